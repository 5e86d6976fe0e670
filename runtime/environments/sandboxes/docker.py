"""Containers through the command line of Docker (or of what answers to its name, as Podman does)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from stackrl.runtime.environments.sandboxes import processes
from stackrl.runtime.environments.sandboxes.base import KEPT_OUTPUT, Machine, Result, Sandbox, SandboxError
from stackrl.runtime.environments.sandboxes.settings import Settings

PROGRAM = "docker"
LABEL = "stackrl.sandbox"
"""Of containers; its value says who made one, see ``owner``."""
LIFETIME_SECONDS = 6 * 3600
"""A container ends by itself after so long, should nobody be left to end it."""
_START_SECONDS = 600.0
"""An image may have to be pulled."""
_ORDER_SECONDS = 60.0

log = logging.getLogger(__name__)


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
        await remove_stale()
        if not self.settings.image:
            return  # those of the tasks may be large, and are tried with them
        async with self.sandbox() as sandbox:
            await sandbox.run(["true"])

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
        options = ["run", "--detach", "--rm", "--name", self._name]
        options += ["--label", f"{LABEL}={owner(os.getpid())}", "--network", "none"]
        options += ["--memory", str(settings.memory), "--memory-swap", str(settings.memory)]
        options += ["--pids-limit", str(settings.processes), "--init"]
        options += ["--ulimit", f"fsize={settings.file_size}", "--ulimit", "core=0"]
        options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        home = f"{self.home}:exec,mode=1777,size={settings.disk},nr_inodes={settings.files}"
        options += ["--tmpfs", home, "--workdir", self.home]
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
        around = [PROGRAM, "exec", "--interactive", "--workdir", folder or self.home, self._name]
        limit = seconds or self._settings.timeout
        async with self._machine.commands:
            try:
                return await processes.run_inside(around, command, seconds=limit, keep=keep, stdin=stdin)
            finally:
                # ending the command line ends nothing in the container
                await asyncio.shield(self._end_commands())

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


def owner(process: int) -> str:
    """Who a process is among all that this daemon may serve: it, its beginning, and its machine.

    Raises OSError where there is none.
    """
    began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{_here()}.{process}.{began}"


def _here() -> str:
    """This machine since it was started, as far as processes see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


async def remove_stale() -> None:
    """Remove containers of processes of this machine that are no more and could not do it themselves."""
    wanted = f'{{{{.Names}}}} {{{{.Label "{LABEL}"}}}}'
    listed = await order("ps", "--all", "--no-trunc", "--filter", f"label={LABEL}", "--format", wanted)
    for line in listed.text.splitlines():
        name, _, made_by = line.partition(" ")
        if _is_gone(made_by):
            log.info("container %s was left by a process that is no more, and is removed", name)
            await order("rm", "--force", "--volumes", name)


def _is_gone(made_by: str) -> bool:
    """Whether a process of this machine made it and has ended; others are nobody's business here."""
    machine, _, process = made_by.rpartition(".")[0].rpartition(".")
    if machine != _here() or not process.isdigit():
        return False
    try:
        return owner(int(process)) != made_by
    except OSError:
        return True


async def order(*words: str, seconds: float = _ORDER_SECONDS) -> Result:
    """What the command line says. Raises SandboxError where there is none."""
    return await processes.run([PROGRAM, *words], seconds=seconds, keep=KEPT_OUTPUT)


def said(result: Result) -> str:
    if result.timed_out:
        return "no answer in time"
    return (result.errors or result.output).decode(errors="replace").strip()[-500:] or f"status {result.code}"
