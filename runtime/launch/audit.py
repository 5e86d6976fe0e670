"""`stackrl audit`: proves from a run's own books that nothing was lost and nothing was trained twice.

The journal, the trainer's ledger and the metrics are written by different processes at different moments;
what they say of the same steps and rollouts must agree. Nothing is written, and the run may go on meanwhile.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stackrl.runtime.launch import findings
from stackrl.runtime.launch.backends import at_work
from stackrl.runtime.launch.books import (
    Books,
    Checkpoint,
    newest_whole,
    read_books,
    read_checkpoints,
    read_ledger,
)
from stackrl.runtime.launch.pace import Speed, speed
from stackrl.runtime.monitor.records import History, Reader
from stackrl.runtime.run import RunFolder, find_run

_SHOWN = 20
"""Findings of one kind that the text names; JSON has all of them."""


@dataclass(frozen=True)
class Rollouts:
    """How many there were and what became of them: planned = trained + dropped + open."""

    planned: int
    finished: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    open: int
    open_reason: str


@dataclass(frozen=True)
class Steps:
    """Optimizer steps that were taken: all, those of RL, and those of each stage."""

    all: int
    rl: int
    stages: dict[str, int]


@dataclass(frozen=True)
class Audit:
    """What the books of a run prove. Each finding is a sentence; none at all means clean."""

    run: str
    time: float
    journal: str
    """Which copy of the journal was read."""
    ledger: str
    """The checkpoint whose ledger it was compared with; empty where there was none."""
    rollouts: Rollouts
    lost: list[str]
    trained_twice: list[str]
    mixed_groups: list[str]
    wrong_steps: list[str]
    steps: Steps
    speed: Speed
    checkpoints: list[Checkpoint]
    notes: list[str]
    """What could not be compared, and why."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.trained_twice or self.mixed_groups or self.wrong_steps)

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in Audit.__dataclass_fields__}
        return fields | {
            "clean": self.clean,
            "rollouts": vars(self.rollouts),
            "steps": vars(self.steps),
            "speed": vars(self.speed),
            "checkpoints": [
                {"name": known.name, "index": known.index, "problem": known.problem}
                for known in self.checkpoints
            ],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def audit(run: RunFolder, *, contents: bool = True) -> Audit:
    """Compare the books of ``run``. Raises RunError where there are none.

    Without ``contents`` checkpoints, which may be large, are not read: names and sizes alone are compared.
    """
    goes_on = at_work(run)
    stack = run.stack()
    known = read_checkpoints(run.checkpoints(stack), contents=contents)
    books = read_books(run, known)
    newest = newest_whole(known)
    ledger = read_ledger(newest) if newest else []
    reader = Reader(run)
    _, events = reader.read()
    return Audit(
        run=run.id,
        time=time.time(),
        journal=books.source,
        ledger=newest.name if newest else "",
        rollouts=_count(books, goes_on),
        lost=[
            *findings.gaps(books),
            *findings.unfinished(books),
            *findings.not_in_both(books, ledger, newest.index if newest else 0),
        ],
        trained_twice=list(findings.trained_twice(ledger)),
        mixed_groups=list(findings.mixed_groups(books, ledger)),
        wrong_steps=[
            *findings.wrong_order(books),
            *(findings.wrong_ledger(books, ledger, newest) if newest else ()),
            *findings.wrong_stages(books, ledger),
            *findings.wrong_metrics(books, reader.history, goes_on),
        ],
        steps=Steps(
            all=len(books.applied),
            rl=sum(batch.kind == "rl" for batch in books.applied),
            stages=dict(Counter(batch.stage for batch in books.applied)),
        ),
        speed=speed(books, reader.history.steps, events, run.read("plan.json")),
        checkpoints=known,
        notes=list(_notes(run, books, newest, reader.history, contents=contents)),
    )


def show(name: str, output: str) -> int:
    """Print the audit of the run called ``name``. 0: clean, 1: not."""
    found = audit(find_run(name))
    print(json.dumps(found.as_json(), indent=1) if output == "json" else found)
    return 0 if found.clean else 1


def _count(books: Books, goes_on: bool) -> Rollouts:
    states = Counter(rollout.state for rollout in books.rollouts)
    open_ = states["planned"] + states["finished"] + states["batched"]
    dropped = Counter(
        (rollout.reason or "unknown").partition(":")[0]
        for rollout in books.rollouts
        if rollout.state == "dropped"
    )
    reason = "the run goes on" if goes_on else "left at the end: no batch needed them any more"
    if not goes_on and states["batched"]:
        reason = "the run ended in the middle of a step; they are trained when it goes on"
    return Rollouts(
        planned=len(books.rollouts),
        finished=sum(rollout.sampled is not None for rollout in books.rollouts),
        trained=states["applied"] + states["durable"],
        dropped=dict(dropped),
        open=open_,
        open_reason=reason if open_ else "",
    )


def _notes(
    run: RunFolder, books: Books, newest: Checkpoint | None, history: History, *, contents: bool
) -> Iterator[str]:
    if newest is None:
        yield "no checkpoint is whole yet: the trainer's ledger could not be compared"
    elif not contents:
        yield f"of checkpoints only names and sizes were compared: `stackrl audit {run.id}` reads all of them"
    if not books.live and history.done > len(books.applied):
        yield (
            f"metrics.jsonl has {history.done} steps, {books.source} {len(books.applied)}: those behind them "
            "are taken again when the run goes on"
        )


def _lines(found: Audit) -> Iterator[str]:
    yield (
        f"run {found.run}: lost {len(found.lost)}, trained twice {len(found.trained_twice)}, "
        f"mixed groups {len(found.mixed_groups)}"
    )
    rollouts, steps = found.rollouts, found.steps
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(rollouts.dropped.items()))
    rows = {
        "rollouts": f"planned {rollouts.planned} = trained {rollouts.trained} + dropped "
        f"{sum(rollouts.dropped.values())} + open {rollouts.open};  finished {rollouts.finished}",
        "dropped": dropped,
        "open": f"{rollouts.open}: {rollouts.open_reason}" if rollouts.open else "",
        "steps": f"{steps.all}, {steps.rl} of them RL ("
        + ", ".join(f"{stage} {count}" for stage, count in steps.stages.items())
        + ")"
        + (f", {len(found.wrong_steps)} wrong" if found.wrong_steps else ", all in order"),
        "speed": str(found.speed),
        "books": f"{found.journal}; "
        + (f"the trainer's ledger of {found.ledger}" if found.ledger else "no ledger of the trainer"),
    }
    yield from (f"  {name:<11} {fact}" for name, fact in rows.items() if fact)
    for known in found.checkpoints:
        yield f"  checkpoint  {known.name}: {known.problem or 'good'}"
    yield from (f"  note        {note}" for note in found.notes)
    for kind in ("lost", "trained_twice", "mixed_groups", "wrong_steps"):
        those = getattr(found, kind)
        yield from (f"  {kind.replace('_', ' ')}: {finding}" for finding in those[:_SHOWN])
        if len(those) > _SHOWN:
            yield f"  {kind.replace('_', ' ')}: and {len(those) - _SHOWN} more; all with `-o json`"
