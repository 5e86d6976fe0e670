"""No isolation at all: programs run as this user, in a folder of their own, with limits and a wall clock."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stackrl.runtime.environments.sandboxes import processes
from stackrl.runtime.environments.sandboxes.base import KEPT_OUTPUT, Machine, Result, Sandbox, SandboxError
from stackrl.runtime.environments.sandboxes.folders import (
    FOLDER,
    check_room,
    remove,
    remove_stale,
    takes_more_than,
)
from stackrl.runtime.environments.sandboxes.settings import Settings


class Host(Machine):
    """This machine as it is."""

    def __init__(self, settings: Settings) -> None:
        if not settings.unsafe_allow_host:
            raise ValueError("sandbox: type host needs unsafe_allow_host: true")
        self.settings = settings
        self.commands = asyncio.Semaphore(settings.at_once)

    async def check(self) -> None:
        await asyncio.to_thread(remove_stale)
        async with self.sandbox() as sandbox:
            await sandbox.run(["true"])

    def sandbox(self, image: str = "") -> HostProcess:
        return HostProcess(self)


class HostProcess(Sandbox):
    """A folder, and commands that start there."""

    def __init__(self, machine: Host) -> None:
        self._machine, self._settings = machine, machine.settings
        self._folder: Path | None = None

    @property
    def home(self) -> str:
        return str(self._folder)

    async def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))

    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        folder: str | None = None,
        keep: int = KEPT_OUTPUT,
    ) -> Result:
        if (own := self._folder) is None:
            raise SandboxError("the sandbox is not running")
        settings, limit = self._settings, seconds or self._settings.timeout
        limits = [f"--as={settings.memory}", f"--fsize={settings.file_size}", f"--cpu={int(limit) + 1}"]
        async with self._machine.commands:
            result = await processes.run_inside(
                ["prlimit", *limits, "--core=0", "--"],
                command,
                seconds=limit,
                keep=keep,
                stdin=stdin,
                env={"PATH": f"{sys.base_prefix}/bin:{os.defpath}", "HOME": self.home, "LANG": "C.UTF-8"},
                folder=folder or self.home,
                watch=lambda: takes_more_than(own, settings.disk, settings.files),
            )
        if result.code:
            check_room(own)
        return result

    async def stop(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove, folder)
