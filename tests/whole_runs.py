"""Whole runs of the orchestrator over the real transport, with a fake engine and a fake trainer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_engine import FakeEngine
from small_runs import STACK, TOKEN, lines, reversed_badly

from stackrl.runtime.orchestrator.loop import orchestrate

PROMPTS = STACK["evaluate"]["prompts"]
"""Of an evaluation."""


def algorithm(**changes):
    return STACK["algorithm"] | changes


async def run_all(run, trainer, *engines):
    with trainer:
        async with asyncio.timeout(60):
            await orchestrate(run, TOKEN, engines)
    assert not trainer.errors


async def stopped_when(condition, run):
    """Run the orchestrator until ``condition``, then end it as SIGTERM does."""
    task = asyncio.create_task(orchestrate(run, TOKEN, [FakeEngine(reversed_badly)]))
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in threads and on disk)
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def first_checkpoint_of(run, trainer, batches):
    """Whether a checkpoint is complete and the trainer has taken ``batches`` batches."""
    folder = run.checkpoints(run.stack())
    return lambda: len(trainer.batches) >= batches and list(folder.glob("*/manifest.json"))


def events_of(run, name):
    return [event for event in lines(run.events) if event["event"] == name]


def documents(ranks):
    """The sequences of an optimizer step as (prompt, all tokens, advantage), in no order."""
    found = []
    for batch in ranks.values():
        for part in batch.micro_batches:
            ends = np.cumsum(part.lengths)
            for end, length, advantage in zip(ends, part.lengths, part.advantages, strict=True):
                tokens = part.tokens[end - length : end]
                first = int(np.argmax(part.loss_mask[end - length : end]))
                found.append((tuple(tokens[:first]), tuple(tokens), round(float(advantage), 6)))
    return sorted(found)
