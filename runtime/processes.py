"""Trees of processes: find them, end them whole, and leave nothing when their keeper is killed (Linux).

A keeper declares itself the reaper of its tree (``PR_SET_CHILD_SUBREAPER``), so that a process whose parent
died, one with a session of its own included, becomes the keeper's child and can still be found. ``guarded``
puts the keeper's work into a child: parent and child watch each other, and either one ends what is left
when the other is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GUARD_LIMIT = 90.0
"""Seconds that guarded work has to end after it was told to, besides what it takes to save."""
LOST = 75
"""Exit code (EX_TEMPFAIL) of what ended through no fault of its own: start it again."""

_WATCHED = {*END_SIGNALS, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """From now on, a descendant whose parent dies becomes a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, death: int = signal.SIGKILL) -> None:
    """Get the signal ``death`` when ``parent``, the process that started this one, dies."""
    _prctl(_PR_SET_PDEATHSIG, death)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), death)


@dataclass(frozen=True)
class Seen:
    """A living process as the kernel lists it."""

    pid: int
    parent: int
    group: int
    state: str


def descendants(root: int) -> list[int]:
    """Pids of all living processes below ``root``, parents before their children. Zombies are left out."""
    return [process.pid for process in _below(root)]


def members(root: int, leader: int, mark: bytes) -> list[int]:
    """Pids below ``root`` of what ``leader`` started: its group, what is below it, and all that has ``mark``
    (`NAME=value`) in the environment it was started with, wherever it has gone since."""
    found = []
    inside = {leader}
    for process in _below(root):
        related = process.pid in inside or process.parent in inside or process.group == leader
        if related or _has(process, mark):
            inside.add(process.pid)
            found.append(process.pid)
    return found


def end_members(root: int, leader: int, mark: bytes, limit: float = 10.0) -> None:
    """SIGKILL all `members` until none is left. Raises TimeoutError after ``limit`` s."""
    _end(lambda: members(root, leader, mark), limit)


def end_tree(root: int, limit: float = 10.0) -> None:
    """SIGKILL everything below ``root`` until nothing is left. Raises TimeoutError after ``limit`` s."""
    _end(lambda: descendants(root), limit)


def reap_sandboxed() -> None:
    """Wait for adopted processes that have ended and were the first of a PID namespace: bubblewrap leaves one
    behind for each command, and who has adopted it keeps it as a zombie. Children of our own are none."""
    depth = _namespaces("self")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or not (seen := _look(entry)):
            continue
        if (seen.parent, seen.state) == (os.getpid(), "Z") and _namespaces(entry.name) > depth:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(seen.pid, os.WNOHANG)


def state_of(pid: int) -> str:
    """The state letter that the kernel shows of a process, such as T: stopped; empty where it is gone."""
    seen = _look(Path("/proc", str(pid)))
    return seen.state if seen else ""


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 where either is gone."""
    seen = _look(Path("/proc", str(pid)))
    return seen.parent if seen else 0


def _end(find: Callable[[], list[int]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while living := find():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {living} did not end {limit:.0f} s after SIGKILL")
        for pid in living:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def _below(root: int) -> list[Seen]:
    children: dict[int, list[Seen]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (process := _look(entry)) and process.state not in "ZX":
            children[process.parent].append(process)
    found = list(children[root])
    for process in found:
        found.extend(children[process.pid])
    return found


def _look(entry: Path) -> Seen | None:
    try:
        # "pid (name) state ppid pgrp …"; the name may hold spaces and parentheses
        state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):  # ended meanwhile
        return None
    return Seen(int(entry.name), int(parent), int(group), state)


def _namespaces(process: str) -> int:
    """PID namespaces that a process of /proc is in, one within the other; 0 where it is gone."""
    try:
        lines = Path("/proc", process, "status").read_text().splitlines()
    except OSError:
        return 0
    return next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 0)


def _has(process: Seen, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send(pid: int, number: int, *, group: bool = False) -> bool:
    """Signal a process or its group. False where it is gone."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return False
    return True


def guarded(work: Callable[[], int], died: Callable[[str], None], limit: float = GUARD_LIMIT) -> int:
    """Run ``work`` in a child process and return its exit code; nothing it started outlives this call.

    ``limit``: seconds that it has to end after it was told to.

    Signals that end a process are passed on to the child, which also gets SIGTERM when this process is
    killed. They are blocked when ``work`` begins, until it is ready for them. When the child itself is
    killed, its descendants are ended, ``died`` is called with the reason, and the exit code is LOST.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    guard = os.getpid()
    _flush()
    child = os.fork()
    if child == 0:
        _become(guard, work)
    told_at: float | None = None
    while (exit_code := _exit_code(child)) is None:
        if told_at is not None and time.monotonic() - told_at > limit:
            send(child, signal.SIGKILL)
        received = signal.sigtimedwait(_WATCHED, 1.0)
        if received is not None and received.si_signo in END_SIGNALS:
            told_at = told_at or time.monotonic()
            send(child, received.si_signo)
    end_tree(guard)
    _exit_code(child)  # the last zombies: not every container has an init that takes them
    if exit_code < 0:
        died(f"the node program was killed by {signal_name(-exit_code)}")
        return LOST
    return exit_code


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _become(guard: int, work: Callable[[], int]) -> None:
    """The child's life: do the work and exit with its code, without ever returning to the caller's code."""
    code = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C reaches the guard alone, which passes it on once
        die_with(guard, signal.SIGTERM)
        code = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that has gone
            stream.flush()


def _exit_code(child: int) -> int | None:
    """Reap what has ended; the exit code of ``child`` (negative: the signal) once it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
