"""Control groups (version 1 and 2): bounds on the memory and the processes of a sandbox as a whole.

Not every user may make them. Without, limits of each process take their place, which bound less.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
PREFIX = "stackrl-"
"""Of the names of control groups made here; the process id of who made one follows."""
_EMPTY_SECONDS = 10.0
"""For processes that were killed to be gone."""


@dataclass(frozen=True)
class Cgroup:
    """The folders of one control group: one in version 2, one for each controller in version 1."""

    folders: tuple[Path, ...]

    @property
    def entrances(self) -> list[str]:
        """Files that a process writes its id into to be in it, with all that it starts."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def out_of_memory(self) -> int:
        """Processes that the bound of the memory ended so far."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def kill(self) -> None:
        """End every process in it, also those that are forked meanwhile."""
        limit = time.monotonic() + _EMPTY_SECONDS
        while (left := self._processes()) and time.monotonic() < limit:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)

    def remove(self) -> None:
        """Raises OSError where something in it cannot be ended."""
        self.kill()
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _processes(self) -> list[int]:
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        return sorted(found)


class Cgroups:
    """Where this process may make control groups."""

    def __init__(self, parents: dict[str, Path], version: int) -> None:
        self._parents, self._version = parents, version

    @classmethod
    def find(cls, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Cgroups | None:
        """None where it may not make any, or where no processes may be moved into them."""
        with contextlib.suppress(OSError, ValueError):
            for parents, version in _candidates(mount, membership):
                groups = cls(parents, version)
                if groups._work():
                    return groups
        return None

    def make(self, name: str, memory: int, processes: int) -> Cgroup:
        """A group with bounds, in bytes and processes. Raises OSError."""
        group = Cgroup(tuple(sorted({parent / name for parent in self._parents.values()})))
        try:
            for folder in group.folders:
                folder.mkdir()
            self._bound(name, memory, processes)
        except OSError:
            with contextlib.suppress(OSError):
                group.remove()
            raise
        return group

    def _bound(self, name: str, memory: int, processes: int) -> None:
        in_memory, in_processes = self._parents["memory"] / name, self._parents["pids"] / name
        bound, swap = (
            ("memory.max", "memory.swap.max")
            if self._version == 2
            else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        )
        (in_memory / bound).write_text(str(memory))
        with contextlib.suppress(OSError):  # a kernel may be built without accounts of swap
            (in_memory / swap).write_text("0" if self._version == 2 else str(memory))
        (in_processes / "pids.max").write_text(str(processes))

    def _work(self) -> bool:
        try:
            group = self.make(f"{PREFIX}{os.getpid()}-probe", 64 << 20, 16)
        except OSError:
            return False
        try:
            return _can_move_into(group)
        finally:
            with contextlib.suppress(OSError):
                group.remove()


def remove_stale(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> None:
    """Remove groups of processes that are no more."""
    with contextlib.suppress(OSError, ValueError):
        for parents, _ in _candidates(mount, membership):
            for parent in set(parents.values()):
                for folder in parent.glob(f"{PREFIX}*-*"):
                    owner = folder.name.removeprefix(PREFIX).partition("-")[0]
                    if owner.isdigit() and not Path("/proc", owner).exists():
                        with contextlib.suppress(OSError):
                            Cgroup((folder,)).remove()


def _candidates(mount: Path, membership: Path):
    """Folders by controller in which groups might be made, the nearest first, and the version."""
    own = {}
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path.lstrip("/")
    if "memory" in own and "pids" in own:
        below = {name: mount / name / own[name] for name in ("memory", "pids")}
        yield below, 1
        yield {name: mount / name for name in ("memory", "pids")}, 1
    if "" in own:
        # a group that holds processes cannot bound those below it: one above may, where it is ours
        folder = mount / own[""]
        while folder != mount.parent:
            given = folder / "cgroup.subtree_control"
            if given.is_file() and {"memory", "pids"} <= set(given.read_text().split()):
                yield {"memory": folder, "pids": folder}, 2
            folder = folder.parent


def _can_move_into(group: Cgroup) -> bool:
    """Whether a process can be put there."""
    child = os.posix_spawn("/bin/sh", ["sh", "-c", _enter(group) + "exec true"], {})
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _enter(group: Cgroup) -> str:
    return "".join(f"echo $$ > '{entrance}' || exit 125; " for entrance in group.entrances)


def entering(group: Cgroup | None) -> list[str]:
    """What stands before a command, so that it begins in ``group``."""
    return ["sh", "-c", f'{_enter(group)}exec "$@"', "sh"] if group else []
