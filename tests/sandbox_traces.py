"""What sandboxes leave on a machine, for tests that nothing is left."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path


def left_behind() -> list[Path]:
    """Folders and control groups of this process's sandboxes."""
    own = f"-{os.getpid()}-"
    temporary = [path for path in Path(tempfile.gettempdir()).glob("stackrl-*") if own in path.name]
    return temporary + list(Path("/sys/fs/cgroup").glob(f"**/stackrl{own}*"))


def sandboxes_of(process: int) -> list[str]:
    """Pids of bubblewrap's processes that are children of another, ended ones included."""
    found = subprocess.run(["pgrep", "-P", str(process), "bwrap"], capture_output=True, text=True)
    return found.stdout.split()


def running(argument: str) -> bool:
    """Whether a `sleep` with this argument is."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"sleep") and argument.encode() in words:
            return True
    return False
