"""Containers through the command line of Docker (or of what answers to its name, as Podman does)."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Sequence

from stackrl.runtime.environments.sandboxes import processes
from stackrl.runtime.environments.sandboxes.base import KEPT_OUTPUT, Machine, Result, Sandbox, SandboxError
from stackrl.runtime.environments.sandboxes.settings import Settings

PROGRAM = "docker"
LABEL = "stackrl.sandbox"
LIFETIME_SECONDS = 6 * 3600
"""A container ends by itself after so long, should nobody be left to end it."""
_START_SECONDS = 600.0
"""An image may have to be pulled."""
_ORDER_SECONDS = 60.0
_REFUSED = 125
"""Exit status of the command line where it is itself that fails."""


class Docker(Machine):
    """The daemon that the command line talks to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.commands = asyncio.Semaphore(settings.at_once)

    async def check(self) -> None:
        if not shutil.which(PROGRAM):
            raise SandboxError(
                f"sandbox docker: {PROGRAM} is not here; install it, or use sandbox: {{type: bubblewrap}}"
            )
        result = await order("version", "--format", "{{.Server.Version}}")
        if result.code:
            raise SandboxError(
                f"sandbox docker: its daemon does not answer ({said(result)}); start it and let this user "
                "use it, or use sandbox: {type: bubblewrap}"
            )
        if not self.settings.image:
            return  # those of the tasks may be large, and are tried with them
        async with self.sandbox() as sandbox:
            result = await sandbox.run(["true"])
        if result.code:
            raise SandboxError(f"sandbox docker: a container does not work here ({said(result)})")

    def sandbox(self, image: str = "") -> Container:
        if not (image := image or self.settings.image):
            raise SandboxError("sandbox docker: the task names no image; write one as sandbox.image")
        return Container(self, image)


class Container(Sandbox):
    """A container without network and capabilities; it sleeps, and commands are run beside that."""

    home = "/box"

    def __init__(self, machine: Docker, image: str) -> None:
        self._machine, self._settings, self._image = machine, machine.settings, image
        self._name = ""

    async def start(self) -> None:
        self._name = f"stackrl-sandbox-{os.getpid()}-{secrets.token_hex(6)}"
        result = await order(*self._options(), seconds=_START_SECONDS)
        if result.code or result.timed_out:
            raise SandboxError(f"sandbox docker: {self._image} does not start: {said(result)}")

    def _options(self) -> list[str]:
        settings = self._settings
        options = ["run", "--detach", "--rm", "--name", self._name, "--label", LABEL, "--network", "none"]
        options += ["--memory", str(settings.memory), "--memory-swap", str(settings.memory)]
        options += ["--pids-limit", str(settings.processes), "--init"]
        options += ["--ulimit", f"fsize={settings.file_size}", "--ulimit", "core=0"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--tmpfs", f"{self.home}:exec,mode=1777,size={settings.disk}", "--workdir", self.home]
        options += ["--env", f"HOME={self.home}", "--entrypoint", "sleep"]
        if settings.user:
            options += ["--user", settings.user]
        return [*options, self._image, str(LIFETIME_SECONDS)]

    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        folder: str | None = None,
        keep: int = KEPT_OUTPUT,
    ) -> Result:
        if not self._name:
            raise SandboxError("the sandbox is not running")
        inside = ["exec", "--interactive", "--workdir", folder or self.home, self._name, *command]
        async with self._machine.commands:
            try:
                result = await processes.run(
                    [PROGRAM, *inside], seconds=seconds or self._settings.timeout, keep=keep, stdin=stdin
                )
            finally:
                # ending the command line ends nothing in the container
                await asyncio.shield(self._end_commands())
        if result.code == _REFUSED and result.errors.startswith(
            (b"Error response from daemon", b"Cannot connect")
        ):
            raise SandboxError(f"sandbox docker: {said(result)}")
        return result

    async def _end_commands(self) -> None:
        """Everything in the container but the first process, which the kernel keeps from it."""
        await order("exec", self._name, "sh", "-c", "kill -9 -1")

    async def stop(self) -> None:
        name, self._name = self._name, ""
        if not name:
            return
        result = await order("rm", "--force", "--volumes", name)
        if result.code and b"No such container" not in result.errors:
            raise SandboxError(f"sandbox docker: container {name} could not be removed: {said(result)}")


async def order(*words: str, seconds: float = _ORDER_SECONDS) -> Result:
    """What the command line says. Raises SandboxError where there is none."""
    return await processes.run([PROGRAM, *words], seconds=seconds, keep=KEPT_OUTPUT)


def said(result: Result) -> str:
    if result.timed_out:
        return "no answer in time"
    return (result.errors or result.output).decode(errors="replace").strip()[-500:] or f"status {result.code}"
