"""Run one program of this machine with a wall clock, bounded output, and nothing left of its group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stackrl.runtime.environments.sandboxes.base import Result, SandboxError

_DRAIN_SECONDS = 5.0
"""For the rest of the output, when everything that could write is ended."""
_CHUNK = 1 << 16
_BEGUN = b"stackrl: the command begins\n"
"""What a command of a sandbox writes to its errors first."""


async def run(
    command: Sequence[str],
    *,
    seconds: float,
    keep: int,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
    end: Callable[[], None] = lambda: None,
    watch: Callable[[], bool] | None = None,
    every: float = 0.5,
) -> Result:
    """Run ``command`` in a session of its own; ``end`` ends what its process group does not hold.

    ``watch`` is asked in a thread ``every`` so many seconds; True ends the command (``out_of_disk``).
    Cancelling ends it too. Raises SandboxError where the program cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=env,
            cwd=folder,
        )
    except (OSError, ValueError) as error:
        raise SandboxError(f"{command[0]} cannot be started: {error}") from error
    streams = [_Stream(process.stdout, keep), _Stream(process.stderr, keep)]
    tasks = [asyncio.ensure_future(stream.read()) for stream in streams]
    tasks.append(asyncio.ensure_future(_feed(process.stdin, stdin)))
    timed_out, overflow = False, False
    try:
        try:
            async with asyncio.timeout(seconds):
                overflow = await _until_ended(process.pid, watch, every)
        except TimeoutError:
            timed_out = True
    finally:
        _end_group(process.pid)
        await asyncio.shield(_ended_all(end, tasks))
    code = await asyncio.wait_for(process.wait(), _DRAIN_SECONDS)
    return Result(
        code=code if code >= 0 else 128 - code,
        output=streams[0].kept,
        errors=streams[1].kept,
        timed_out=timed_out,
        out_of_disk=overflow,
        truncated=any(stream.more for stream in streams),
    )


async def run_inside(around: Sequence[str], command: Sequence[str], *, keep: int, **options: Any) -> Result:
    """Run ``command`` by the programs ``around`` it that make it a sandbox's; ``options`` as of ``run``.

    Raises SandboxError also where it never began: what fails around it is not its own doing.
    """
    begin = f"echo '{_BEGUN.decode().rstrip()}' >&2; exec \"$@\""
    result = await run([*around, "sh", "-c", begin, "sh", *command], keep=keep + len(_BEGUN), **options)
    before, begun, after = result.errors.partition(_BEGUN)
    if not begun and not result.out_of_disk:
        said = result.errors.decode(errors="replace").strip()[-500:] or f"exit status {result.code}"
        raise SandboxError(f"a command did not begin{' in time' if result.timed_out else ''}: {said}")
    errors = before + after
    truncated = result.truncated or max(len(result.output), len(errors)) > keep
    return replace(result, output=result.output[:keep], errors=errors[:keep], truncated=truncated)


class _Stream:
    """The beginning of what a program writes; the rest is read and forgotten."""

    def __init__(self, reader: asyncio.StreamReader, keep: int) -> None:
        self._reader, self._keep = reader, keep
        self._parts: list[bytes] = []
        self.more = False

    async def read(self) -> None:
        room = self._keep
        while chunk := await self._reader.read(_CHUNK):
            self._parts.append(chunk[:room])
            self.more |= len(chunk) > room
            room = max(room - len(chunk), 0)

    @property
    def kept(self) -> bytes:
        return b"".join(self._parts)


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a program need not read all that it is given
        writer.write(data)
        await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _until_ended(pid: int, watch: Callable[[], bool] | None, every: float) -> bool:
    """Wait for the process alone, not for others that hold its output; whether ``watch`` ended the wait."""
    ended = asyncio.ensure_future(_ended(pid))
    try:
        while True:
            done, _ = await asyncio.wait([ended], timeout=every if watch else None)
            if done:
                return False
            if watch is not None and await asyncio.to_thread(watch):
                return True
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def _ended(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(descriptor, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _ended_all(end: Callable[[], None], tasks: list[asyncio.Future]) -> None:
    """Whatever is left, and the rest of the output; a pipe that somebody still holds is left alone."""
    await asyncio.to_thread(end)
    _, pending = await asyncio.wait(tasks, timeout=_DRAIN_SECONDS)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
