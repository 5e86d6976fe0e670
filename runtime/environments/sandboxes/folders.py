"""Folders of this machine that hold the files of a sandbox."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from stackrl.runtime.environments.sandboxes.base import SandboxError

FOLDER = "stackrl-sandbox-"
"""Of the folders' names; the process id of who made one follows."""
LEAST_FREE = 16 << 20
"""Bytes; with fewer of them the disk of this machine is full."""
_COUNT_SECONDS = 60.0


def takes_more_than(folder: Path, size: int, files: int) -> bool:
    """Whether ``folder`` takes more than ``size`` bytes of the disk, or holds more than ``files`` files and
    folders, or more than can be counted."""
    counts = (("-B1", size), ("--inodes", files))
    try:
        return any(_counted(folder, how) > limit for how, limit in counts)
    except subprocess.TimeoutExpired:
        return True


def _counted(folder: Path, how: str) -> int:
    command = ["du", "-sx", how, "--", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
    count = found.stdout.split()
    return int(count[0]) if count else 0


def check_room(folder: Path) -> None:
    """Raises SandboxError where this machine's disk is full: what failed then may have failed of that."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < LEAST_FREE:
            raise SandboxError(f"the disk that holds {folder.parent} is full")


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
