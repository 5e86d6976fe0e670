"""A run that is stopped and resumed on other numbers of ranks goes on as one that was never stopped.

The orchestrator and the trainer's processes are real; the engine gives fixed replies.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from small_runs import lines, reversed_badly
from trainer_runs import LIMIT, TOKEN, logs, make_run, make_stack, start_rank

from stackrl.runtime import checkpoints
from stackrl.runtime.inference.client import Generation
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.ledger import read_ledger
from stackrl.runtime.trainer.models.prepare import prepare
from stackrl.schemas.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BATCH = 16
SUPERVISED, EVERY, STEPS = 2, 3, 9
"""Optimizer steps: supervised ones, from checkpoint to checkpoint, all."""


def stack(ranks: int, context: int) -> Stack:
    """Small batches, micro-batches that take several of them, and a rate that changes at every step."""
    return make_stack(
        roles={"trainer": {"processes": ranks}, "inference": {"processes": 1}},
        trainer={
            "sequence_length": 128,
            "parallel": {"context": context},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "schedule": {"type": "linear"}},
        },
        inference={"max_model_length": 128},
        environments=[{"name": "reverse", "type": "reverse_text", "args": {"letters": [3, 6]}}],
        sampling={"max_tokens": 9, "timeout": 60.0},
        algorithm={"group_size": 4, "batch_size": BATCH, "max_staleness": 0},
        evaluate={"prompts": 8},
        checkpoint={"every": EVERY},
        stages=[
            {"name": "warmup", "type": "supervised", "steps": SUPERVISED, "batch_size": 8},
            {"name": "main", "type": "rl", "steps": STEPS - SUPERVISED},
        ],
    )


class FixedReplies(FakeEngine):
    """Prompt and seed decide reply and logprobs; these are near those of a model that knows nothing."""

    def __init__(self) -> None:
        super().__init__(reversed_badly)

    async def generate(self, tokens: Sequence[int], **request: Any) -> Generation:
        generation = await super().generate(tokens, **request)
        return replace(generation, logprobs=[logprob - 5.0 for logprob in generation.logprobs])

    def asked_by_step(self) -> dict[int, list[tuple[list[int], int]]]:
        """Prompt and seed of every request on sampled tokens, by the RL step that the engine held."""
        found = defaultdict(list)
        for request in self.requests:
            if request["temperature"]:
                found[request["held"].step].append((request["tokens"], request["seed"]))
        return {step: sorted(requests) for step, requests in found.items()}


@dataclass
class Life:
    """What one attempt asked of the engine, by RL step, and its metrics, by optimizer step."""

    asked: dict[int, list[tuple[list[int], int]]]
    records: dict[int, dict[str, Any]]


def live(path: Path, ranks: int, *, context: int = 1, until: int | None = None) -> Life:
    """An attempt of the run in ``path`` with ``ranks`` trainer processes, ``context`` of which share a batch.

    It goes to the end, or is stopped when the checkpoint at ``until`` is complete and a step beyond it taken.
    """
    incarnation = RunFolder(path).state().incarnation + 1 if path.exists() else 1
    run = make_run(path, stack(ranks, context), incarnation)
    prepare(run)
    before = len(lines(run.metrics)) if run.metrics.exists() else 0
    engine = FixedReplies()
    asyncio.run(_live(run, ranks, engine, until))
    return Life(engine.asked_by_step(), {record["index"]: record for record in lines(run.metrics)[before:]})


async def _live(run: RunFolder, ranks: int, engine: FixedReplies, until: int | None) -> None:
    processes = [start_rank(run, rank, ranks) for rank in range(ranks)]
    work = asyncio.create_task(orchestrate(run, TOKEN, [engine]))
    try:
        async with asyncio.timeout(LIMIT):
            while not (work.done() or _reached(run, until)):
                assert not any(process.poll() for process in processes), logs(run)
                await asyncio.sleep(0.01)
        if work.done():
            work.result()
            assert until is None, "the run was over before it could be stopped"
            codes = [await asyncio.to_thread(process.wait, 60) for process in processes]
            assert not any(codes), logs(run)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for process in processes:
            process.kill()
            process.wait()


def _reached(run: RunFolder, index: int | None) -> bool:
    if index is None or not run.metrics.exists():
        return False
    complete = checkpoints.folder(run.checkpoints(run.stack()), index) / checkpoints.MANIFEST
    return complete.exists() and lines(run.metrics)[-1]["index"] >= index


def test_from_one_rank_to_two_that_share_batches_to_two_that_do_not(tmp_path: Path) -> None:
    unbroken = live(tmp_path / "unbroken", 1)
    live(tmp_path / "broken", 1, until=3)
    sharing = live(tmp_path / "broken", 2, context=2, until=6)
    apart = live(tmp_path / "broken", 2)

    assert list(unbroken.records) == list(range(STEPS))
    assert (tmp_path / "broken" / "final" / "config.json").exists()
    last = checkpoints.newest(tmp_path / "broken" / "checkpoints")
    learnt = [name for line in read_ledger(last) for name, _ in line["documents"]]
    assert len(learnt) == len(set(learnt)) == BATCH * (STEPS - SUPERVISED)
    for life, first in ((sharing, 3), (apart, 6)):
        assert min(life.records) == first
        for index in range(first, first + 3):
            expected, found = unbroken.records[index], life.records[index]
            for name in ("step", "stage", "stage_step", "reward", "trainer/learning_rate"):
                assert found[name] == expected[name], (index, name)
            for name in ("trainer/loss", "trainer/gradient_norm", "trainer/entropy"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5), (index, name)
            step = expected["step"]
            assert len(life.asked[step]) == BATCH and life.asked[step] == unbroken.asked[step]

    losses = [unbroken.records[index]["trainer/loss"] for index in range(3, STEPS)]
    assert min(abs(a - b) for a, b in combinations(losses, 2)) > 1e-4, "one step could pass for another"
