"""A supervised stage: batches of rows, or of the environments' demonstrations, drawn from the seed tree."""

from __future__ import annotations

import asyncio
from typing import Protocol

from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import demonstrate
from stackrl.runtime.orchestrator.datasets import Dataset
from stackrl.runtime.orchestrator.errors import BadInput
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.orchestrator.training import Training, Work
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import SupervisedStage


class Source(Protocol):
    """Where a stage's batches come from."""

    def work(self, step: int) -> Work:
        """The batch of the stage's step ``step``: the same whenever it is drawn."""


def source_of(stage: SupervisedStage, stack: Stack, chat: Chat, run: RunFolder) -> Source:
    """What ``stage`` learns from: its data, else its environments."""
    return Demonstrations(stage, stack, chat) if stage.data is None else Dataset(stage, stack, run)


async def run_supervised(stage: SupervisedStage, done: int, source: Source, training: Training) -> None:
    """Take the steps of ``stage`` from step ``done`` on; each batch is drawn while the last one trains."""
    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(asyncio.to_thread(source.work, done))
        for step in range(done, stage.steps):
            training.progress.doing(f"drawing examples for step {step} of stage {stage.name}")
            work = await drawing
            if step + 1 < stage.steps:
                drawing = tasks.create_task(asyncio.to_thread(source.work, step + 1))
            await training.take(work)


class Demonstrations:
    """Those of a stage's environments."""

    def __init__(self, stage: SupervisedStage, stack: Stack, chat: Chat) -> None:
        self._stage, self._chat, self._limit = stage, chat, stack.trainer.sequence_length
        seeds = Seeds(stack.seed).branch("supervised", stage.name)
        self._mix = Mix(settings_of(stack, stage).environments, seeds)

    def work(self, step: int) -> Work:
        noise = 0.0 if step < self._stage.clean_steps else self._stage.noise
        samples = [
            _demonstration(self._mix, (step, i), noise, self._chat, self._limit)
            for i in range(self._stage.batch_size)
        ]
        return Work(self._stage, step, samples, record={"noise": noise})


def _demonstration(mix: Mix, number: tuple[int, ...], noise: float, chat: Chat, limit: int) -> Sample:
    draw = mix.draw(*number)
    rng = draw.seeds.branch("demonstration").rng()
    try:
        turns = draw.environment.demonstration(draw.task, rng, noise)
    except NotImplementedError as error:
        raise BadInput(f"environment {draw.name!r} has nothing for a supervised stage: {error}") from error
    shown = demonstrate(chat, draw.task.messages, turns, draw.environment.tools)
    samples = shown.samples("demonstration", 0, draw.name, 1.0)
    longest = max(len(sample.tokens) for sample in samples)
    if longest > limit:
        raise BadInput(
            f"a demonstration of environment {draw.name!r} has {longest} tokens, over "
            f"trainer.sequence_length: {limit}; raise that or make the environment's tasks shorter"
        )
    [sample] = samples
    return sample
