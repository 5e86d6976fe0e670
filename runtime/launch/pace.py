"""Tokens per second per device: recomputed from the journal, beside what the run reported."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from stackrl.runtime.launch.books import BatchRow, Books
from stackrl.runtime.monitor.records import Record


@dataclass(frozen=True)
class Speed:
    """Tokens of the steps whose duration the journal knows: generated ones, and those that the trainer went
    through, prompts included."""

    devices: int
    tokens: int
    seconds: float
    recomputed: float | None
    """Tokens per second per device by the journal; None where it knows no step's duration."""
    reported: float | None
    """The same of the same steps by metrics.jsonl."""

    def __str__(self) -> str:
        if self.recomputed is None:
            return "no two steps followed each other yet"
        reported = "nothing" if self.reported is None else f"{self.reported:.1f}"
        return (
            f"{self.recomputed:.1f} tokens/s per device by the journal ({self.tokens} tokens in "
            f"{self.seconds:.1f} s on {self.devices} devices), {reported} by metrics.jsonl"
        )


def speed(books: Books, steps: list[Record], events: list[Record], plan: dict[str, Any]) -> Speed:
    """From the journal, and from ``steps`` and ``events``, the run's own records of itself.

    Over all steps that followed another one of their stage without an evaluation in between.
    """
    devices = count_devices(plan)
    finished = sorted(
        (rollout.finished_at, rollout.sampled)
        for rollout in books.rollouts
        if rollout.finished_at is not None and rollout.sampled is not None
    )
    times = [at for at, _ in finished]
    sampled = [0, *accumulate(count for _, count in finished)]
    evaluations = sorted(event["time"] for event in events if event["event"] == "evaluated")
    records = {record["index"]: record for record in steps}
    tokens = seconds = told_tokens = told_seconds = 0.0
    for before, batch in _followed(books, evaluations):
        generated = (
            sampled[bisect_left(times, batch.applied_at)] - sampled[bisect_left(times, before.applied_at)]
        )
        tokens += generated + batch.packed_tokens
        seconds += batch.applied_at - before.applied_at
        record = records.get(batch.id, {})
        if record.get("tokens_per_second") is not None:
            told_tokens += record["tokens_per_second"] * record["seconds_step"]
            told_seconds += record["seconds_step"]
    return Speed(
        devices=devices,
        tokens=int(tokens),
        seconds=seconds,
        recomputed=tokens / seconds / devices if seconds else None,
        reported=told_tokens / told_seconds / devices if told_seconds else None,
    )


def count_devices(plan: dict[str, Any]) -> int:
    """The plan's GPUs; without any, its engines and trainer ranks."""
    gpus = {(process["node"], gpu) for process in plan["processes"] for gpu in process.get("gpus", ())}
    return len(gpus) or sum(process["role"] != "orchestrator" for process in plan["processes"]) or 1


def _followed(books: Books, evaluations: list[float]) -> Iterator[tuple[BatchRow, BatchRow]]:
    """Pairs of steps between whose ends nothing but the second one was done."""
    for before, batch in pairwise(books.applied):
        known = None not in (before.applied_at, batch.applied_at, batch.packed_tokens)
        if not known or (before.stage, before.incarnation) != (batch.stage, batch.incarnation):
            continue
        first = bisect_left(evaluations, before.applied_at)
        if first == len(evaluations) or evaluations[first] >= batch.applied_at:
            yield before, batch
