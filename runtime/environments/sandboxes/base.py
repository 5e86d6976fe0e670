"""A sandbox: a place where programs that a model wrote run, behind five verbs, the same for every kind.

A sandbox belongs to one rollout. ``run`` ends with its command: what that left running is ended too, so that
nothing works on between two commands. Files stay until ``stop``.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

FILE_SECONDS = 60.0
"""For reading or writing one file."""
STOP_SECONDS = 60.0
KEPT_OUTPUT = 1 << 20
"""Bytes of each stream of a command that are kept, where the caller does not say."""


class SandboxError(Exception):
    """A sandbox that does not do its work: a fault of the machine, never of the program in it."""


@dataclass(frozen=True)
class Result:
    """What became of a command."""

    code: int
    """Its exit status; 128 and the signal where one ended it."""
    output: bytes = b""
    errors: bytes = b""
    timed_out: bool = False
    out_of_memory: bool = False
    """Whether the memory's bound ended one of its processes."""
    out_of_disk: bool = False
    """Whether it was ended because the files were too many or too large."""
    truncated: bool = False
    """Whether there was more output than was to be kept."""

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Sandbox(ABC):
    """Use it as an asynchronous context manager: it starts on entering and is gone on leaving."""

    home: str
    """The folder of its own, where commands start: an absolute path inside."""

    @abstractmethod
    async def start(self) -> None:
        """Make it. Raises SandboxError."""

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        folder: str | None = None,
        keep: int = KEPT_OUTPUT,
    ) -> Result:
        """Run ``command`` in ``folder``, ``home`` by default, and end whatever it started.

        ``seconds`` of wall clock, by default the sandbox's; ``keep`` bytes of each stream are returned.
        Raises SandboxError where it could not even begin.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End everything in it and remove it; again does nothing."""

    async def write(self, path: str, data: bytes) -> None:
        """Make a file and the folders above it. Raises SandboxError.

        As ``read``, this goes through a command inside: a link that a program planted leads nowhere else.
        """
        script = f"mkdir -p {shlex.quote(posixpath.dirname(path) or '.')} && cat > {shlex.quote(path)}"
        result = await self.run(["sh", "-c", script], stdin=data, seconds=FILE_SECONDS)
        if result.code:
            raise SandboxError(f"{path} could not be written in the sandbox: {_said(result)}")

    async def read(self, path: str, limit: int) -> bytes:
        """The first ``limit`` bytes of a file. Raises SandboxError."""
        command = ["head", "-c", str(limit), "--", path]
        result = await self.run(command, seconds=FILE_SECONDS, keep=max(limit, KEPT_OUTPUT))
        if result.code:
            raise SandboxError(f"{path} could not be read in the sandbox: {_said(result)}")
        return result.output

    async def __aenter__(self) -> Sandbox:
        try:
            await self.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        """To the end, also where the rollout is cancelled a second time meanwhile."""
        stopping = asyncio.ensure_future(asyncio.wait_for(self.stop(), STOP_SECONDS))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait([stopping])
            raise
        except TimeoutError:
            raise SandboxError(f"the sandbox could not be removed within {STOP_SECONDS:g} s") from None


class Machine(ABC):
    """A kind of sandbox on this machine, with the settings of the stack."""

    @abstractmethod
    async def check(self) -> None:
        """Try one. Raises SandboxError with what to install, allow or change."""

    @abstractmethod
    def sandbox(self, image: str = "") -> Sandbox:
        """A new one, not yet started; ``image`` is for containers."""


def _said(result: Result) -> str:
    if result.timed_out:
        return f"it took over {FILE_SECONDS:g} s"
    return result.errors.decode(errors="replace").strip()[-500:] or f"exit status {result.code}"
