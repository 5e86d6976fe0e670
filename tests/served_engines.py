"""Fake engines as a run has them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random

from small_runs import chat

from stackrl.runtime.environments import make
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, roll_out_somewhere
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.environments import Environment
from stackrl.schemas.inference import PullWeights

SOURCE = "http://weights"


@asynccontextmanager
async def serving(*engines):
    """The engines, served while the context is open."""
    together = Engines(engines, 8, PullWeights())
    task = asyncio.create_task(together.serve(lambda name, **fields: None, 5))
    yield together
    task.cancel()


class Served:
    """Engines that are served, and the events that they reported."""

    def __init__(self, engines: Engines, task: asyncio.Task) -> None:
        self.engines, self.task = engines, task
        self.events: list[tuple[str, dict]] = []

    def named(self, name: str) -> list[dict]:
        return [fields for event, fields in self.events if event == name]

    async def until(self, condition, within=30.0):
        async with asyncio.timeout(within):
            while not condition():  # noqa: ASYNC110 (many kinds of things are waited for)
                await asyncio.sleep(0.005)

    async def update(self, step, within=30.0):
        self.engines.aim(Version(1, step), SOURCE)
        await self.engines.holding(Version(1, step), within)

    async def roll_out(self, group, seconds=5.0):
        environment = make(Environment(name="it", type="reverse_text", args={"letters": [3, 6]}))
        task = environment.task(Random(group))
        what = Assignment(group, 0, "it", environment, task, Seeds(0).branch("sample", group))
        return await roll_out_somewhere(what, chat(), self.engines, Limits(9, 128, seconds, 1.0))


@asynccontextmanager
async def served(*fakes, silence=0.3, timeout=0.5, within=30.0, requests=8):
    engines = Engines(fakes, requests, PullWeights(timeout=timeout), silence=silence)
    found = Served(engines, None)
    found.task = asyncio.create_task(
        engines.serve(lambda name, **fields: found.events.append((name, fields)), within)
    )
    yield found
    found.task.cancel()
    await asyncio.gather(found.task, return_exceptions=True)
