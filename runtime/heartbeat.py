"""Signs of life: each process of a role touches a file every second and writes into it what it is doing.

    heartbeats/trainer-0.4711       {"doing": "step 12", "since": 1764500000.0, "index": 12}

The node program reads them, and so tells a process that is stopped or hangs from one that is slow. SIGUSR1
makes a process that beats write the stacks of all its threads to its log.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackrl.runtime import processes
from stackrl.runtime.run import open_private

HEARTBEATS_VARIABLE = "STACKRL_HEARTBEATS"
"""Folder of the files; without it nothing is written."""
PROCESS_VARIABLE = "STACKRL_PROCESS"
"""The process of the plan, such as `trainer-0`, that a process and its children belong to."""
BEAT_SECONDS = 1.0
DUMP_SIGNAL = signal.SIGUSR1
_SUSPENDED_SECONDS = 5.0
"""A reader that did not look for this long was stopped itself, or the whole machine was."""
_QUICKEST_SECONDS = 0.05
_STDERR = 2


def start(process: str = "", *, follow_forks: bool = False) -> None:
    """Begin to beat as ``process``, where the environment does not name it. A second call does nothing.

    ``follow_forks``: children that this process forks beat too, each with a file of its own.
    """
    global _heart
    folder, name = os.environ.get(HEARTBEATS_VARIABLE), os.environ.get(PROCESS_VARIABLE) or process
    if not folder or not name or _heart is not None:
        return
    faulthandler.register(DUMP_SIGNAL, file=_STDERR, all_threads=True)
    _heart = _Heart(Path(folder), name, follow_forks)


def note(doing: str, **progress: Any) -> None:
    """Say what this process does now, in a few words such as `waiting for batch 12`, and how far it is.

    ``progress`` is JSON-able; what was said before and is not said anew stays.
    """
    if _heart is not None:
        _heart.note(doing, progress)


class _Heart:
    """A thread that writes the file of this process. A disk that is full does not stop it."""

    def __init__(self, folder: Path, process: str, follow_forks: bool) -> None:
        self._folder, self._process, self.follows_forks = folder, process, follow_forks
        self._content: dict[str, Any] = {"doing": "starting", "since": time.time()}
        self._noting = threading.Lock()
        self._leaving = False
        self._beat_on()
        atexit.register(self.leave)

    def note(self, doing: str, progress: Mapping[str, Any]) -> None:
        with self._noting:
            since = self._content["since"] if doing == self._content["doing"] else time.time()
            self._content = {**self._content, **progress, "doing": doing, "since": since}
        self._noted.set()

    def beat_in_child(self) -> None:
        self._noting = threading.Lock()  # a thread that is gone may have held the old one
        self._beat_on()

    def _beat_on(self) -> None:
        self._file = self._folder / f"{self._process}.{os.getpid()}"
        self._noted = threading.Event()
        self._write(self._content)
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        written = None
        while not self._leaving:
            self._noted.clear()
            content = self._content
            if content is written or not self._write(content):
                self._touch()
            else:
                written = content
            time.sleep(_QUICKEST_SECONDS)
            self._noted.wait(BEAT_SECONDS - _QUICKEST_SECONDS)

    def _write(self, content: Mapping[str, Any]) -> bool:
        new = self._file.with_name(f".{self._file.name}")
        try:
            with open(new, "w", opener=open_private) as file:
                json.dump(content, file)
            os.replace(new, self._file)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """From here on this process has no threads, and may take long to let go of its memory."""
        self._leaving = True
        self._noted.set()
        self._thread.join(BEAT_SECONDS)
        self._file.unlink(missing_ok=True)

    def _touch(self) -> None:
        """Needs no room on the disk once the file is there."""
        with contextlib.suppress(OSError):
            os.close(open_private(self._file, os.O_WRONLY | os.O_CREAT))
            os.utime(self._file)


_heart: _Heart | None = None


def _forked() -> None:
    """Threads do not survive a fork: a child beats with one of its own, or not at all."""
    global _heart
    if _heart is not None and _heart.follows_forks:
        _heart.beat_in_child()
    elif _heart is not None:
        atexit.unregister(_heart.leave)  # the file is the parent's
        _heart = None


os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class _Seen:
    """The time of a file's newest beat, and the reader's own clock when it found it."""

    beat: int
    at: float


class Listener:
    """The node program's ear. Times are its own monotonic clock's, so that no change of date deceives it."""

    def __init__(self, folder: Path, limit: float) -> None:
        """``limit``: seconds without a beat after which a process is taken for stopped."""
        self._folder, self._limit = folder, limit
        self._seen: dict[str, _Seen] = {}
        self._looked = time.monotonic()

    def says(self, process: str, pid: int) -> dict[str, Any]:
        """What the process said last; {} where it has said nothing."""
        try:
            return json.loads((self._folder / f"{process}.{pid}").read_bytes())
        except (OSError, ValueError):
            return {}

    def silent(self, pids: Mapping[str, int]) -> dict[str, str]:
        """Of these processes, by name, those that are silent for too long, and in which words.

        ``pids`` are their first processes; those below them beat as well. One that has not begun to beat, or
        is on its way out, is given all the time it wants, unless it is stopped.
        """
        now = time.monotonic()
        if now - self._looked > _SUSPENDED_SECONDS:
            self._seen.clear()
        self._looked = now
        found = {}
        for process, pid in pids.items():
            for beating, beat in self._beats(process, pid).items():
                key = f"{process}.{beating}"
                if (seen := self._seen.get(key)) is None or seen.beat != beat:
                    self._seen[key] = _Seen(beat, now)
                elif now - seen.at > self._limit:
                    if self._belongs(beating, pid):
                        found[process] = _words(beating, now - seen.at)
                    else:  # it has ended
                        (self._folder / key).unlink(missing_ok=True)
        return found

    def beating(self, process: str, pid: int) -> list[int]:
        """Pids of ``process``, whose first one is ``pid``, that can be asked for their stacks."""
        return [beating for beating in self._files(process) if self._belongs(beating, pid)]

    def forget(self, process: str) -> None:
        """Its processes have ended."""
        for file in self._folder.glob(f"{process}.*"):
            file.unlink(missing_ok=True)
        self._seen = {key: seen for key, seen in self._seen.items() if not key.startswith(f"{process}.")}

    def _beats(self, process: str, pid: int) -> dict[int, int]:
        """Pid → its newest beat. A stopped process that never began counts as one whose only beat is long
        ago."""
        beats = self._files(process)
        if pid not in beats and processes.state_of(pid) == "T":
            beats[pid] = 0
        return beats

    def _files(self, process: str) -> dict[int, int]:
        """Pid → time at which its file was touched."""
        found = {}
        for file in self._folder.glob(f"{process}.*"):
            with contextlib.suppress(OSError, ValueError):
                found[int(file.suffix[1:])] = file.stat().st_mtime_ns
        return found

    def _belongs(self, pid: int, first: int) -> bool:
        """Whether ``pid`` lives and is ``first`` or below it, and not a stranger that took over a number."""
        return pid == first or pid in processes.descendants(first)


def _words(pid: int, seconds: float) -> str:
    how = "stopped: SIGSTOP" if processes.state_of(pid) == "T" else "it hangs; stacks in its log"
    return f"was silent for {seconds:.0f} s ({how})"
