"""Locks on files, which the kernel opens when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import time
from typing import IO

_LOOK_EVERY = 0.02


def locked_by(file: IO[bytes], deadline: float) -> bool:
    """Take the exclusive lock of an open file, which goes with it; False where another process keeps it until
    ``deadline`` (time.monotonic seconds). It is tried once at least."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY)
        else:
            return True
