"""Folders of this machine that hold the files of a sandbox."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

from stackrl.runtime.environments.sandboxes.base import SandboxError

FOLDER = "stackrl-sandbox-"
"""Of the folders' names; the process id of who made one follows."""
_COUNT_SECONDS = 60.0


def takes_more_than(folder: Path, limit: int) -> bool:
    """Whether the files in ``folder`` take more than ``limit`` bytes of the disk."""
    command = ["du", "-sx", "-B1", "--", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
    size = found.stdout.split()
    return bool(size) and int(size[0]) > limit


def remove(folder: Path) -> None:
    """Raises SandboxError. rm goes as deep as there are folders, and follows no links."""
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], capture_output=True, check=False)
    if folder.exists():
        raise SandboxError(f"{folder} of a sandbox could not be removed; delete it by hand")


def remove_stale() -> None:
    """Those of processes that are no more and could not do it themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(SandboxError, OSError):
                remove(folder)
