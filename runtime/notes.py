"""What the node program writes of a run: its state, its own log, its events. A full disk does not end it.

What is not written is written later (the state) or lost (lines, events), and that is told once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stackrl.runtime.run import RunFolder, State, open_private

_USED_EVERY = 30.0
"""Seconds by which the written time of work may be behind."""
_LAST_TRIES = 5
NODE = "node"

Show = Callable[[str, str], None]


class Notes:
    """The books of one attempt, which begins with them."""

    def __init__(self, run: RunFolder, show: Show | None) -> None:
        """Raises OSError where the attempt's number cannot be raised."""
        before = run.state()
        self._run, self._stream = run, show
        self._began, self._used_before = time.monotonic(), before.used
        self._told: set[str] = set()
        self.state = State(
            status="starting",
            attempt=before.attempt + 1,
            incarnation=before.incarnation,
            began=time.time(),
            used=before.used,
            fruitless=before.fruitless,
        )
        run.write_state(self.state)
        self._written = self.state
        self.logs = run.logs(self.state.attempt)
        self._log = self.logs / f"{NODE}.log"
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def used(self) -> float:
        """Seconds that node programs have worked on the run, this one included."""
        return self._used_before + time.monotonic() - self._began

    def change(self, **changes: Any) -> None:
        """Write the state where it changed, or was not written so far."""
        self.state = replace(self.state, **changes)
        old = self._written
        if self.state == old and self.used - old.used < _USED_EVERY:
            return
        try:
            self.change_durably()
        except OSError as error:
            self.complain(f"{self._run.path / 'state.json'} cannot be written: {error.strerror}")

    def change_durably(self, **changes: Any) -> None:
        """Write the state now. Raises OSError."""
        written = replace(self.state, **changes, used=self.used)
        self._run.write_state(written)
        self.state = self._written = written

    def end(self, **changes: Any) -> None:
        """Write how the attempt ended. Where the disk is full, over what stands there."""
        self.state = replace(self.state, **changes)
        write_end(self._run, replace(self.state, used=self.used))

    def say(self, text: str) -> None:
        """A line of the node program's own."""
        with contextlib.suppress(OSError), open(self._log, "a", opener=open_private) as log:
            log.write(text + "\n")
        self.show(NODE, text)

    def show(self, name: str, line: str) -> None:
        """Pass a line on to whoever watches the node program; they may have gone, or their disk be full."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream(name, line)

    def complain(self, text: str) -> None:
        """Tell once, on stderr too."""
        if text not in self._told:
            self._told.add(text)
            self.say(text)
            tell(text)

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's events, in one piece."""
        line = json.dumps({"time": time.time(), "event": name, **fields}) + "\n"
        try:
            append_whole(self._run.events, line.encode())
        except OSError as error:
            self.complain(f"{self._run.events} cannot be written: {error.strerror}")

    def logging(self) -> logging.Handler:
        """A handler that takes warnings of the code that the node program calls into its log."""
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.say(record.getMessage())  # type: ignore[method-assign]
        return handler


def write_end(run: RunFolder, state: State) -> None:
    """Write the last state of an attempt, if need be in place of the old one, which needs no room. What
    cannot be written is told on stderr."""
    for _ in range(_LAST_TRIES):
        try:
            return run.write_state(state)
        except OSError as error:
            problem = error
        time.sleep(0.2)
    try:
        _overwrite(run.path / "state.json", json.dumps(asdict(state)).encode())
    except OSError:
        tell(f"the end of run {run.id} could not be written to {run.path}: {problem.strerror}")
        tell(f"run {run.id}: {state.status}: {state.reason}")


def append_whole(path: Path, line: bytes) -> None:
    """Append ``line`` in one write, or nothing. Raises OSError."""
    descriptor = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        if (written := os.write(descriptor, line)) < len(line):
            with contextlib.suppress(OSError):  # a part of a line would spoil the next one
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(28, os.strerror(28), str(path))
    finally:
        os.close(descriptor)


def tell(text: str) -> None:
    """A line on stderr, in one piece: launchers put a mark before whatever is written at once."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _overwrite(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        size = os.fstat(descriptor).st_size
        os.pwrite(descriptor, data.ljust(size), 0)  # JSON does not mind blanks at its end
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
