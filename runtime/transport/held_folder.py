"""Where the workers of one engine on one node keep the weights that they hold: in memory that they share.

    /dev/shm/stackrl-<run>-<hash>-engine-0/
        inhabited    locked by each process that uses the folder, for as long as it lives
        turn         locked by the one that brings the weights to another version
        weights      the tensors; while they are brought to another version, anything
        manifest     of the version that `weights` is, whole; not there meanwhile

The kernel opens locks when a process ends, however it ends, so that a folder whose engine was killed is found
out and removed by the next one that looks (`sweep`). An engine that is started again soon enough finds what
it held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stackrl.runtime.file_locks import locked_by
from stackrl.runtime.run import open_private

HELD_VARIABLE = "STACKRL_HELD_WEIGHTS"
"""Folder of an engine, for its workers."""
PREFIX = "stackrl-"


class HeldFolderBusy(Exception):
    """Another process of the engine did not let go in time."""


def held_path(run: Path, engine: int) -> Path:
    """Of an engine of the run whose folder is ``run``: in memory, which is a disk where a machine has no
    /dev/shm."""
    which = hashlib.sha256(bytes(run)).hexdigest()[:8]
    return _memory() / f"{PREFIX}{run.name}-{which}-engine-{engine}"


class HeldFolder:
    """One process's use of the folder, which is made when it is first needed; the last to close it removes
    it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inhabited: int | None = None

    def enter(self) -> None:
        """Raises OSError where the folder cannot be made, or is somebody else's."""
        while self._inhabited is None:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self.path.is_symlink() or self.path.stat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to somebody else")
            with contextlib.suppress(FileNotFoundError):
                descriptor = open_private(self.path / "inhabited", os.O_RDWR | os.O_CREAT)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _is_still(descriptor, self.path / "inhabited"):
                    self._inhabited = descriptor
                else:
                    os.close(descriptor)  # it was swept away in this moment

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest"

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Be the only one. Raises HeldFolderBusy at ``deadline`` (time.monotonic seconds)."""
        with open(self.path / "turn", "ab", opener=open_private) as file:
            if not locked_by(file, deadline):
                raise HeldFolderBusy(f"another worker kept {self.path} to itself for too long")
            yield

    def close(self) -> None:
        if self._inhabited is not None:
            os.close(self._inhabited)
            self._inhabited = None
            _remove_if_left(self.path)


def sweep() -> None:
    """Remove the folders of engines that are gone."""
    for folder in _memory().glob(f"{PREFIX}*-engine-*"):
        _remove_if_left(folder)


def _memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "inhabited", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def _is_still(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
