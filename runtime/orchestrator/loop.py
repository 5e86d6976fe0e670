"""The life of a run: everybody arrives, the stages follow each other, everybody leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stackrl.runtime.environments.workers import close_workers
from stackrl.runtime.monitor.metrics import Sink, open_sinks
from stackrl.runtime.monitor.rollouts import RolloutLog
from stackrl.runtime.orchestrator.batching import Layout
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import ENGINE_LIMIT, Engines
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.evaluations import Evaluations, newest_weights
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.membership import Connect, Membership
from stackrl.runtime.orchestrator.packing import causal_cost
from stackrl.runtime.orchestrator.reading import Reading
from stackrl.runtime.orchestrator.recorder import Recorder
from stackrl.runtime.orchestrator.reinforcement import Reinforcement
from stackrl.runtime.orchestrator.resuming import Start, take_up
from stackrl.runtime.orchestrator.saving import Saving
from stackrl.runtime.orchestrator.signals import look_for_own_functions
from stackrl.runtime.orchestrator.stop import Stop
from stackrl.runtime.orchestrator.supervised import run_supervised, source_of
from stackrl.runtime.orchestrator.training import STEP_LIMIT, Training
from stackrl.runtime.orchestrator.turns import collect_garbage
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchServer
from stackrl.runtime.transport.messages import Hello
from stackrl.schemas.degrees import degrees_of
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage

if TYPE_CHECKING:
    from stackrl.runtime.inference.client import Engine

HELLO_LIMIT = 1800.0
"""Seconds within which all ranks of the trainer arrive."""

log = logging.getLogger(__name__)


async def orchestrate(
    run: RunFolder,
    token: str,
    clients: Sequence[Engine],
    stop: Stop | None = None,
    connect: Connect | None = None,
) -> None:
    """Run all stages of ``run`` from where it stands, with engines ``clients``; less where ``stop`` is asked.

    ``connect`` makes the clients of engines that join the run; without it none does, and none leaves.

    Raises GuardStop where a guard asked for that, and OrchestratorError, TransportError or EngineError
    naming what is in the way; also as the first cause inside an exception group.
    """
    stop = stop or Stop()
    stack = run.stack()
    chat = Chat.load(run.model, stack.model)
    look_for_own_functions(stack)
    start = Start(run, stack)
    async with AsyncExitStack() as resources:
        for client in clients:
            resources.push_async_callback(client.close)
        resources.push_async_callback(close_workers)
        sink = resources.enter_context(open_sinks(run, stack))
        rollouts = RolloutLog(run.path / "rollouts", stack.monitors.rollouts)
        resources.push_async_callback(asyncio.to_thread, rollouts.close)
        journal = start.open_journal(sink, rollouts)
        resources.callback(journal.close)
        index = journal.position().index
        recorder = Recorder(run, stack, sink, rollouts, index, start.index)
        resources.push_async_callback(recorder.close)
        server = BatchServer(
            run.endpoints().orchestrator,
            token,
            incarnation=start.incarnation,
            index=index,
            resumed=start.restarted,
            sealed=journal.sealed() is not None,
        )
        server.on_logprobs = recorder.logprobs
        resources.push_async_callback(server.close)
        await server.start()
        engines = Engines(
            clients,
            stack.inference.most_rollouts,
            stack.weights,
            silence=stack.limits.silence_seconds,
            adaptive=stack.inference.concurrency == "adaptive",
        )
        resources.push_async_callback(engines.close)
        members = Membership(run, engines, connect, recorder.progress) if connect is not None else None
        await _Life(run, stack, chat, start, journal, sink, recorder, server, engines, stop, members).lead()
    stop.raise_alarm()


@dataclass
class _Life:
    """An orchestrator that is set up, from the trainer's greeting to its leave."""

    run: RunFolder
    stack: Stack
    chat: Chat
    start: Start
    journal: Journal
    sink: Sink
    recorder: Recorder
    server: BatchServer
    engines: Engines
    stop: Stop
    members: Membership | None

    async def lead(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self.engines.serve(self.sink.event, ENGINE_LIMIT))
            stopping = tasks.create_task(self.stop.wait())
            collecting = tasks.create_task(collect_garbage())
            following = tasks.create_task(self.members.follow()) if self.members else None
            await self._make_data_ready(tasks, stopping)
            hello = await self._meet(tasks, stopping)
            if hello is not None:
                await self._work(hello, tasks, stopping)
            stopping.cancel()
            serving.cancel()
            collecting.cancel()
            if following is not None:
                following.cancel()

    async def _meet(self, tasks: asyncio.TaskGroup, stopping: asyncio.Task[None]) -> Hello | None:
        """The trainer's greeting; None where the run is to stop before it."""
        self.recorder.progress.doing("waiting for the trainer to start")
        # a rank that is busy with a step says nothing before it is over
        limit = HELLO_LIMIT + (STEP_LIMIT if self.start.restarted else 0)
        meeting = tasks.create_task(self.server.hello(limit))
        await asyncio.wait([meeting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not meeting.done():
            meeting.cancel()
            return None
        return meeting.result()

    async def _make_data_ready(self, tasks: asyncio.TaskGroup, stopping: asyncio.Task[None]) -> None:
        """Look at every row of the stages with data before anything is trained; the trainer waits."""
        stopped, begun = threading.Event(), self.journal.position().stage_steps

        def goes_on(stage: str, rows: int) -> bool:
            self.recorder.progress.rows_read(f"reading the data of stage {stage}: row {rows + 1}")
            return not stopped.is_set()

        rows = Reading(self.run, self.stack, self.chat, begun, goes_on)
        reading = tasks.create_task(asyncio.to_thread(rows.read))
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.set()
        for made in await reading:
            self.sink.event("data_ready", **made)

    async def _work(self, hello: Hello, tasks: asyncio.TaskGroup, stopping: asyncio.Task[None]) -> None:
        """Take the run's steps until they are done or it is to stop."""
        saving = Saving(
            self.run,
            self.stack,
            self.server,
            self.journal,
            self.recorder,
            tasks,
            self.start.index,
            hello.ranks,
        )
        cost = causal_cost(_hidden_size(self.run.model))
        context = degrees_of(self.stack, hello.ranks).context
        layout = Layout(self.stack.trainer.sequence_length, hello.ranks, cost, context)
        training = Training(
            self.stack,
            self.server,
            self.journal,
            self.engines,
            self.recorder,
            saving,
            layout,
            hello,
            self.stop,
        )
        running = tasks.create_task(self._take_steps(training, saving))
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await self._leave(training, running)

    async def _take_steps(self, training: Training, saving: Saving) -> None:
        if self.start.restarted:
            await take_up(self.run, self.stack, self.chat, self.journal, training, saving)
        evaluations = Evaluations(self.run, self.stack, self.chat, self.engines, training, self.sink)
        await Stages(
            self.run, self.stack, self.chat, self.engines, self.journal, training, self.sink, evaluations
        ).run()
        await training.finish()

    async def _leave(self, training: Training, running: asyncio.Task[None]) -> None:
        limit = self.stack.limits.stop_seconds
        try:
            async with asyncio.timeout(limit):
                await training.leave(running)
        except TimeoutError:
            raise OrchestratorError(
                f"the run was to stop, but step {training.index} and its checkpoint were not finished within "
                f"limits.stop_seconds: {limit:.0f}"
            ) from None


@dataclass
class Stages:
    """Stage after stage, from where the journal stands."""

    folder: RunFolder
    stack: Stack
    chat: Chat
    engines: Engines
    journal: Journal
    training: Training
    sink: Sink
    evaluations: Evaluations

    async def run(self) -> None:
        steps = self.journal.position().stage_steps
        begun = [stage for stage in self.stack.stages if stage.name in steps]
        for stage in self.stack.stages:
            done = steps.get(stage.name, 0)
            if done == stage.steps:
                if stage is begun[-1] and stage.type == "rl":  # its weights are those that the engines have
                    await self.evaluations.after(stage)
                continue
            self.sink.event("stage_started", stage=stage.name, kind=stage.type, step=done, steps=stage.steps)
            if stage.type == "rl":
                await self._reinforce(stage, done)
            else:
                await self.evaluations.first(stage)
                source = source_of(stage, self.stack, self.chat, self.folder)
                await run_supervised(stage, done, source, self.training)
            self.sink.event("stage_finished", stage=stage.name, kind=stage.type)

    async def _reinforce(self, stage: RlStage, done: int) -> None:
        if not self.engines.serving_now:
            self.sink.event("engines_awaited")
        await newest_weights(self.engines, self.training)
        await (self.evaluations.between if done else self.evaluations.before)(stage)
        reinforcement = Reinforcement(
            stage,
            done,
            self.stack,
            settings_of(self.stack, stage),
            self.chat,
            self.engines,
            self.journal,
            self.training,
            self.sink,
        )
        self.training.restart_clock()
        await reinforcement.run(lambda: self.evaluations.between(stage))
        await self.evaluations.after(stage)


def _hidden_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_bytes())
    return config.get("text_config", config)["hidden_size"]
