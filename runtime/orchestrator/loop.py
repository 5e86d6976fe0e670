"""The life of a run: everybody arrives, the stages follow each other, everybody leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor.metrics import Sink, open_sinks
from stackrl.runtime.orchestrator.batching import Layout
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.evaluation import evaluate
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.packing import causal_cost
from stackrl.runtime.orchestrator.reinforcement import Reinforcement
from stackrl.runtime.orchestrator.rollout import Limits
from stackrl.runtime.orchestrator.supervised import run_supervised
from stackrl.runtime.orchestrator.training import Training
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchServer
from stackrl.schemas.environments import Environment
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage, Stage

if TYPE_CHECKING:
    from stackrl.runtime.inference.client import Engine

HELLO_LIMIT = 1800.0
"""Seconds within which all ranks of the trainer arrive."""
ENGINE_LIMIT = 1800.0
"""Seconds within which all engines serve."""

log = logging.getLogger(__name__)


async def orchestrate(run: RunFolder, token: str, clients: Sequence[Engine]) -> None:
    """Run all stages of ``run`` from where its newest checkpoint stands, with engines ``clients``.

    Raises OrchestratorError, TransportError or EngineError naming what is in the way; also as the first
    cause inside an exception group.
    """
    stack = run.stack()
    chat = Chat.load(run.model)
    checkpoint = checkpoints.newest(run.checkpoints(stack))
    journal = _open_journal(run, checkpoint)
    engines = Engines(clients, stack.inference.max_requests, stack.weights)
    server = BatchServer(
        run.endpoints().orchestrator,
        token,
        incarnation=run.state().incarnation,
        index=journal.position().index,
    )
    with open_sinks(run, stack) as sink:
        try:
            await server.start()
            async with asyncio.TaskGroup() as tasks:
                updating = tasks.create_task(_serve_engines(engines, sink))
                hello = await server.hello(HELLO_LIMIT)
                await _resume(run, stack, checkpoint, sink)
                cost = causal_cost(_hidden_size(run.model))
                layout = Layout(stack.trainer.sequence_length, hello.ranks, cost)
                training = Training(run, stack, server, journal, engines, sink, layout, hello, tasks)
                await Stages(stack, chat, engines, journal, training, sink).run()
                await training.finish()
                updating.cancel()
        finally:
            await server.close()
            await asyncio.gather(*(client.close() for client in clients))
            journal.close()


@dataclass
class Stages:
    """Stage after stage. Evaluations come before and after each RL stage."""

    stack: Stack
    chat: Chat
    engines: Engines
    journal: Journal
    training: Training
    sink: Sink

    async def run(self) -> None:
        steps = self.journal.position().stage_steps
        begun = [stage for stage in self.stack.stages if stage.name in steps]
        for stage in self.stack.stages:
            done = steps.get(stage.name, 0)
            if done == stage.steps:
                if stage is begun[-1] and stage.type == "rl":  # its last evaluation came after the cut
                    await self._evaluate(stage, settings_of(self.stack, stage).environments, "after")
                continue
            self.sink.event("stage_started", stage=stage.name, kind=stage.type, step=done, steps=stage.steps)
            if stage.type == "rl":
                await self._reinforce(stage, done)
            else:
                await run_supervised(stage, done, self.stack, self.chat, self.training)
            self.sink.event("stage_finished", stage=stage.name, kind=stage.type)

    async def _reinforce(self, stage: RlStage, done: int) -> None:
        settings = settings_of(self.stack, stage)
        limits = self._limits(stage)
        if not self.engines.serving_now:
            self.sink.event("engines_awaited")
        await self._synchronised()
        if done == 0:
            await self._evaluate(stage, settings.environments, "before")
        reinforcement = Reinforcement(
            stage,
            done,
            self.stack,
            settings,
            limits,
            self.chat,
            self.engines,
            self.journal,
            self.training,
            self.sink,
        )

        async def hold_out() -> None:
            plan = self.stack.evaluate
            if plan is not None and self.training.step % plan.every == 0:
                for environment in plan.environments:
                    await self._evaluate(stage, [environment], f"held-out {environment.name}")
                self.training.restart_clock()

        self.training.restart_clock()
        await reinforcement.run(hold_out)
        await self._evaluate(stage, settings.environments, "after")

    async def _evaluate(self, stage: Stage, environments: Sequence[Environment], when: str) -> None:
        await self._synchronised()
        result = await evaluate(environments, self.stack.seed, self.chat, self.engines, self._limits(stage))
        place = {"version": str(self.engines.version), "index": self.training.index}
        self.sink.event("evaluated", stage=stage.name, when=when, **place, **result)

    async def _synchronised(self) -> None:
        """Wait until the engines hold the newest weights."""
        await self.engines.holding(self.training.version, ENGINE_LIMIT + self.engines.update_limit)

    def _limits(self, stage: Stage) -> Limits:
        sampling = settings_of(self.stack, stage).sampling
        return Limits(
            turn=sampling.max_tokens,
            sequence=min(self.stack.trainer.sequence_length, self.stack.inference.max_model_length),
            seconds=sampling.timeout,
            temperature=sampling.temperature,
        )


async def _serve_engines(engines: Engines, sink: Sink) -> None:
    """Wait for the engines, then keep them on the newest version. Ends only by an error or by being ended."""
    engines.on_update(
        lambda version, seconds: sink.event("weights_updated", version=str(version), seconds=seconds)
    )
    await engines.ready(ENGINE_LIMIT)
    sink.event("engines_ready")
    await engines.keep_current()


async def _resume(run: RunFolder, stack: Stack, checkpoint: Path | None, sink: Sink) -> None:
    """Say where a run goes on, and take what it cannot use out of its way.

    For when all ranks have said hello: they choose their checkpoint before that, and none looks again.
    """
    index = checkpoints.index_of(checkpoint) if checkpoint else 0
    damaged = await asyncio.to_thread(checkpoints.set_aside, run.checkpoints(stack), index)
    if checkpoint or run.state().attempt > 1:
        facts = {"from": str(checkpoint or ""), "index": index, "damaged": [str(path) for path in damaged]}
        sink.event("resumed", **facts)


def _open_journal(run: RunFolder, checkpoint: Path | None) -> Journal:
    if checkpoint is None:
        return Journal(run.journal)
    log.info("resuming from %s", checkpoint)
    return Journal(run.journal, checkpoint / "orchestrator" / "journal.sqlite")


def _hidden_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_bytes())
    return config.get("text_config", config)["hidden_size"]
