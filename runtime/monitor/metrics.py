"""Where the numbers of a run go: JSON lines in its folder, and Weights & Biases where asked for."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Protocol

from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder, open_private
from stackrl.runtime.transport.auth import blotted
from stackrl.schemas.stack import Stack


class Destination(Protocol):
    """Something that takes steps and events; a new one is a class here and a line in `open_sinks`."""

    def log(self, record: dict[str, Any]) -> None: ...

    def event(self, record: dict[str, Any]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class JsonLines:
    """A file of JSON objects, one a line, each written whole before the call returns. Mode 600."""

    def __init__(self, path: Path) -> None:
        # without a buffer, nothing is left of a line that a full disk has refused
        self._file = open(path, "ab", buffering=0, opener=open_private)  # noqa: SIM115 (see close)
        self._path = path
        if _is_torn(path):
            self._write(b"\n")

    def log(self, record: dict[str, Any]) -> None:
        """Raises OSError with the file's name where the disk refuses."""
        self._write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")

    def close(self, *, failed: bool = False) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


class Sink:
    """What the orchestrator writes to. Use as a context, or close it."""

    def __init__(self, run: RunFolder, others: list[Destination]) -> None:
        self._metrics, self._events, self._others = JsonLines(run.metrics), JsonLines(run.events), others

    def log(self, record: dict[str, Any]) -> None:
        """One optimizer step; ``record["index"]`` is its place on the x axis. `time` is added."""
        record = _without_token({"time": time.time(), **record})
        for destination in (self._metrics, *self._others):
            destination.log(record)

    def event(self, name: str, **fields: Any) -> None:
        """Something that happened between steps: a stage, an update of weights, a checkpoint."""
        record = _without_token({"time": time.time(), "event": name, **fields})
        self._events.log(record)
        for destination in self._others:
            destination.event(record)

    def close(self, *, failed: bool = False) -> None:
        for destination in (self._metrics, self._events, *self._others):
            destination.close(failed=failed)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)


def open_sinks(run: RunFolder, stack: Stack) -> Sink:
    """Everything that this stack's metrics go to. A resumed run is continued in each.

    Raises SystemExit where a monitor is asked for that is not installed or cannot be reached.
    """
    others: list[Destination] = []
    if stack.monitors.wandb is not None:
        from stackrl.runtime.monitor.wandb import WandbRun

        offline = not os.environ.get("WANDB_API_KEY")
        others.append(WandbRun(run, stack, stack.monitors.wandb, offline=offline))
    return Sink(run, others)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null, which the view shows as a gap."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _without_token(record: dict[str, Any]) -> dict[str, Any]:
    """Events hold what others say, errors of servers and of environments; the run's token goes nowhere."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    text = json.dumps(record)
    return json.loads(blotted(text, token)) if token and token in text else record


def _is_torn(path: Path) -> bool:
    """Whether a process that was killed, or a full disk, left the last line of the file without its end."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
