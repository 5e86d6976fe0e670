"""A supervised stage: batches of the environments' demonstrations, drawn from the seed tree."""

from __future__ import annotations

import asyncio

from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import demonstrate
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.orchestrator.training import Training, Work
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import SupervisedStage


async def run_supervised(
    stage: SupervisedStage, done: int, stack: Stack, chat: Chat, training: Training
) -> None:
    """Take the steps of ``stage`` from step ``done`` on; each batch is drawn while the last one trains."""
    seeds = Seeds(stack.seed).branch("supervised", stage.name)
    mix = Mix(settings_of(stack, stage).environments, seeds)

    def draw(step: int) -> Work:
        noise = 0.0 if step < stage.clean_steps else stage.noise
        samples = [
            _demonstration(mix, (step, i), noise, chat, stack.trainer.sequence_length)
            for i in range(stage.batch_size)
        ]
        return Work(stage, step, samples, record={"noise": noise})

    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(asyncio.to_thread(draw, done))
        for step in range(done, stage.steps):
            work = await drawing
            if step + 1 < stage.steps:
                drawing = tasks.create_task(asyncio.to_thread(draw, step + 1))
            await training.take(work)


def _demonstration(mix: Mix, number: tuple[int, ...], noise: float, chat: Chat, limit: int) -> Sample:
    draw = mix.draw(*number)
    turns = draw.environment.demonstration(draw.task, draw.seeds.branch("demonstration").rng(), noise)
    samples = demonstrate(chat, draw.task.messages, turns).samples("demonstration", 0, draw.name, 1.0)
    longest = max(len(sample.tokens) for sample in samples)
    if longest > limit:
        raise OrchestratorError(
            f"a demonstration of environment {draw.name!r} has {longest} tokens, over "
            f"trainer.sequence_length: {limit}; raise that or make the environment's tasks shorter"
        )
    [sample] = samples
    return sample
