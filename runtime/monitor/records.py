"""What a run has written about itself so far, read while it goes on, and figures made of it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.monitor.doings import Doing, read_doings
from stackrl.runtime.run import RunFolder, State
from stackrl.schemas.stack import Stack

Record = dict[str, Any]

RECENT = 10
"""Steps that a "now" is averaged over."""
_KEPT_EVENTS = 100


class Tail:
    """Reads the lines that were added to a file of JSON lines since the last time; a torn last line waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [record for line in whole.splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> Record | None:
    """None for a line that a full disk or a killed process has cut short, behind which others may follow."""
    try:
        return json.loads(line)
    except ValueError:
        return None


@dataclass
class History:
    """A run as its files tell it. ``steps`` are the records of metrics.jsonl by index, in order."""

    run: str
    stack: Stack
    state: State
    steps: list[Record] = field(default_factory=list)
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    """The newest records of events.jsonl."""
    evaluations: dict[str, dict[str, Record]] = field(default_factory=dict)
    """Stage → `before`, `after` … → the event."""
    restarts: int = 0
    """How often processes had to be started again; those that were started together count once."""
    doings: dict[str, Doing] = field(default_factory=dict)
    """What the processes say they are doing now."""
    handle: Handle = field(default_factory=lambda: Handle("local", hourly=0.0))
    """Who carries the run, and what its machines cost."""

    def add(self, steps: Iterable[Record], events: Iterable[Record] = ()) -> None:
        """Append records. A run that goes on from a checkpoint takes the steps behind it again: what was
        there before is forgotten, also while there is nothing new yet."""
        for record in steps:
            self._forget(record["index"])
            self.steps.append(record)
        for event in events:
            if event["event"] == "resumed":
                self._forget(event["index"], event["time"])
            self.events.append(event)
            self.restarts += event["event"] == "restarted"
            if event["event"] == "evaluated":
                self.evaluations.setdefault(event["stage"], {})[event["when"]] = event

    def _forget(self, index: int, before: float = math.inf) -> None:
        """Leave out the steps from ``index`` on that were recorded ``before`` that time."""
        while self.steps and self.steps[-1]["index"] >= index and self.steps[-1]["time"] <= before:
            self.steps.pop()

    @property
    def total(self) -> int:
        return sum(stage.steps for stage in self.stack.stages)

    @property
    def done(self) -> int:
        return self.steps[-1]["index"] + 1 if self.steps else 0

    def of_stage(self, name: str) -> list[Record]:
        return [record for record in self.steps if record["stage"] == name]

    def values(self, key: str, steps: list[Record] | None = None) -> list[float]:
        """All values of one metric, gaps left out."""
        records = self.steps if steps is None else steps
        return [record[key] for record in records if record.get(key) is not None]

    def now(self, key: str) -> float | None:
        """Mean of a metric over the newest steps of the current stage; None where there are none."""
        if not self.steps:
            return None
        values = self.values(key, self.of_stage(self.steps[-1]["stage"])[-RECENT:])
        return fmean(values) if values else None

    def seconds_per_step(self, kind: str) -> float | None:
        """Median over the newest steps of one kind; None before there was one."""
        seconds = self.values("seconds_step", [record for record in self.steps if record["kind"] == kind])
        return median(seconds[-2 * RECENT :]) if seconds else None

    def seconds_left(self) -> tuple[float | None, float | None]:
        """Of the current stage and of the whole run; None where a kind of step was not seen yet."""
        if not self.steps:
            return None, None
        newest = self.steps[-1]
        names = [stage.name for stage in self.stack.stages]
        place = names.index(newest["stage"])
        left = newest["stage_steps"] - newest["stage_step"] - 1
        rate = self.seconds_per_step(newest["kind"])
        if rate is None:
            return None, None
        total: float | None = left * rate
        for stage in self.stack.stages[place + 1 :]:
            rate_of = self.seconds_per_step(stage.type)
            total = None if total is None or rate_of is None else total + stage.steps * rate_of
        return left * rate, total

    def gains(self) -> list[tuple[str, float, float]]:
        """Stage, mean reward of its first steps, mean reward of its last ones, for every RL stage so far."""
        found = []
        for stage in self.stack.stages:
            rewards = self.values("reward", self.of_stage(stage.name)) if stage.type == "rl" else []
            if rewards:
                size = min(RECENT, max(1, len(rewards) // 2))
                found.append((stage.name, fmean(rewards[:size]), fmean(rewards[-size:])))
        return found


class Reader:
    """Follows the files of a run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._metrics, self._events = Tail(run.metrics), Tail(run.events)
        self.history = History(run.id, run.stack(), run.state(), handle=Handle.of(run))

    def read(self) -> tuple[list[Record], list[Record]]:
        """Take in what is new, and return it: steps and events."""
        steps, events = self._metrics.read(), _merged(self._events.read())
        self.history.state = self._run.state()
        self.history.doings = read_doings(self._run.heartbeats)
        self.history.add(steps, events)
        return steps, events


def _merged(events: Iterable[Record]) -> list[Record]:
    """Restarts of several processes for one reason as one event, whose `process` names them all."""
    merged: list[Record] = []
    for event in events:
        if merged and event["event"] == merged[-1]["event"] == "restarted" and _together(merged[-1], event):
            merged[-1] = merged[-1] | {"process": f"{merged[-1]['process']}, {event['process']}"}
        else:
            merged.append(event)
    return merged


def _together(one: Record, other: Record) -> bool:
    return all(one.get(key) == other.get(key) for key in ("reason", "count", "incarnation"))
