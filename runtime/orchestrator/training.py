"""One optimizer step, seen from the orchestrator: seal, hand over, wait, write down, and cut checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.groups import FinishedGroup
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.recorder import Recorder
from stackrl.runtime.orchestrator.saving import Saving
from stackrl.runtime.orchestrator.stop import Stop
from stackrl.runtime.transport.batches import BatchServer, TransportError
from stackrl.runtime.transport.messages import Batch, Hello, Sample, Version
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import Stage

FETCH_LIMIT = 600.0
"""Seconds within which every rank takes a batch that is offered, once it has saved what it must."""
STEP_LIMIT = 7200.0
"""Seconds that an optimizer step with the publication of its weights may take."""
END_LIMIT = 600.0
"""Seconds within which every rank hears that the run is over."""
REPEATED = 3.0
"""Seconds within which a rank that has greeted repeats its last acknowledgement."""


@dataclass
class Work:
    """What one optimizer step is made of. ``record`` are the metrics that are known before it."""

    stage: Stage
    stage_step: int
    samples: Sequence[Sample]
    groups: Sequence[FinishedGroup] = ()
    record: dict[str, Any] = field(default_factory=dict)
    held_out: Sequence[Sample] = ()
    """What the loss is measured on after the step."""


class Training:
    """The trainer, one optimizer step at a time."""

    def __init__(
        self,
        stack: Stack,
        server: BatchServer,
        journal: Journal,
        engines: Engines,
        recorder: Recorder,
        saving: Saving,
        layout: Layout,
        hello: Hello,
        stop: Stop,
    ) -> None:
        position = journal.position()
        self.index, self.step = position.index, position.step
        """Optimizer steps taken, and those of RL among them."""
        self.progress = recorder.progress
        self._hello = hello
        self._stack = stack
        self._end = sum(stage.steps for stage in stack.stages)
        self._published_from = sum(stage.steps for stage in stack.stages if stage.type == "supervised")
        self._server, self._journal, self._engines = server, journal, engines
        self._recorder, self._saving, self._layout, self._stop = recorder, saving, layout, stop
        self._stepping = asyncio.Lock()
        """Held from the sealing of a batch until its step is written down."""
        self._pace = _Pace(engines)
        self._update_engines(max(hello.version, self.version))

    @property
    def version(self) -> Version:
        """Of the weights after the last step."""
        return Version(self._hello.incarnation, self.step)

    async def take(self, work: Work) -> None:
        """One optimizer step. Returns when it is applied, written down and recorded.

        Never returns where the run is to stop: then `leave` follows.
        """
        async with self._stepping:
            if not self._stop.asked:
                await self._step(work)
                return
        await _for_ever()

    async def settle(self, work: Work) -> None:
        """The step of a batch that was sealed by an orchestrator which was killed.

        Rank 0's greeting says whether it has stepped on it. If not, the batch is offered as it was; ranks
        that have it already have said so.
        """
        async with self._stepping:
            place = self._place(work)
            self._recorder.sealed(place, work.groups, work.samples)
            if self._hello.index > place.index:
                ack = await self._server.repeated(place.index, REPEATED)
                self._server.go_on()
                trainer = ack.metrics if ack else {}
            else:
                await self._server.offer(await self._built(work, place))
                trainer = await self._applied(place)
            await self._step_on(work, place, trainer, {})
            self._pace.mark()

    async def write_down_again(self, work: Work, step: int) -> None:
        """The metrics of the last step, which an orchestrator that was killed has applied and not told."""
        ack = await self._server.repeated(self.index - 1, REPEATED)
        self._record(work, self.index - 1, step, ack.metrics if ack else {}, {})

    def restart_clock(self) -> None:
        """What was done since the last step is no part of the next one: an evaluation, or a start."""
        self._pace.mark()

    def is_saved(self, index: int) -> bool:
        """Whether a checkpoint belongs to ``index`` steps."""
        return index > 0 and (index % self._stack.checkpoint.every == 0 or index == self._end)

    async def finish(self) -> None:
        """Wait for the last checkpoint, then let the trainer go."""
        async with self._stepping:
            if not self._stop.asked:
                await self._saving.finish()
                self.progress.doing("waiting for the trainer to leave")
                await self._server.end("finished", END_LIMIT)
                return
        await _for_ever()

    async def leave(self, running: asyncio.Task[None]) -> None:
        """End ``running``, which takes steps, after the one that runs; save, and let the trainer go.

        Nothing is saved twice, nor weights that may be damaged.
        """
        async with self._stepping:
            if running.done():
                return
            running.cancel()
            await asyncio.wait([running])
            save = self._stop.save and self.index > self._saving.newest
            if save:
                self._saving.cut(self.index)
            self.progress.doing("waiting for the trainer to leave")
            await self._server.end(self._stop.reason, END_LIMIT, save=save)
            await self._saving.finish()
            self._recorder.event(
                "stopped", index=self.index, saved=self._saving.newest, why=self._stop.reason
            )

    async def _step(self, work: Work) -> None:
        place = self._place(work)
        work.record["seconds_rollouts_wait"] = self._pace.since_last()
        batches = await self._built(work, place)
        groups = [group.plan.id for group in work.groups]
        packed = sum(len(sample.tokens) for sample in work.samples)
        await self._journal.write(
            self._journal.seal, place, work.stage.type, groups, tokens=packed, record=work.record
        )
        self._recorder.sealed(place, work.groups, work.samples)
        await self._server.offer(batches)
        trainer = await self._applied(place)
        pace = self._pace.lap(trained=trainer.get("tokens_packed", 0))
        await self._step_on(work, place, trainer, pace)

    async def _built(self, work: Work, place: Place) -> list[Batch]:
        """The batch for each rank. Large arrays are made beside the event loop."""
        return await asyncio.to_thread(build, work.samples, place, self._layout, work.held_out)

    async def _applied(self, place: Place) -> dict[str, float]:
        """Wait until the trainer has stepped on the batch that is offered; its metrics."""
        self.progress.doing(f"waiting for the trainer's step {place.index}")
        await self._fetched()
        return (await self._server.applied(STEP_LIMIT)).metrics

    async def _fetched(self) -> None:
        """Wait until every rank has the batch. One that saves may take it when that is done."""
        saving = self._saving.under_way
        try:
            await self._server.fetched(FETCH_LIMIT)
        except TransportError:
            if not saving:
                raise
            await self._saving.trainer_saved()
            await self._server.fetched(FETCH_LIMIT)

    async def _step_on(
        self, work: Work, place: Place, trainer: Mapping[str, float], pace: Mapping[str, float]
    ) -> None:
        """The trainer has applied the batch of ``place``."""
        await self._journal.write(self._journal.apply, place.index)
        self.index += 1
        self.step += work.stage.type == "rl"
        self._update_engines(self.version)
        self._record(work, place.index, place.step, trainer, pace)
        if place.checkpoint and self._stop.save:
            self._saving.cut(self.index)

    def _record(
        self, work: Work, index: int, step: int, trainer: Mapping[str, float], pace: Mapping[str, float]
    ) -> None:
        """Write a step down; what is not known of it is left out."""
        alarm = self._recorder.stepped(
            {
                "kind": work.stage.type,
                "stage": work.stage.name,
                "stage_step": work.stage_step,
                "stage_steps": work.stage.steps,
                "index": index,
                "step": step,
                **work.record,
                **pace,
                **{f"trainer/{name}": value for name, value in trainer.items()},
            }
        )
        if alarm is not None:
            self._stop.ask(alarm)

    def _place(self, work: Work) -> Place:
        return Place(
            incarnation=self._hello.incarnation,
            index=self.index,
            step=self.step,
            stage=work.stage.name,
            stage_step=work.stage_step,
            checkpoint=self.is_saved(self.index + 1),
            last_of_stage=work.stage_step + 1 == work.stage.steps,
            report=self._recorder.wants_logprobs(work.stage.type, self.step),
        )

    def _update_engines(self, version: Version) -> None:
        """Until supervised stages are over, the trainer publishes nothing."""
        if self._hello.index >= self._published_from or self.index >= self._published_from:
            self._engines.aim(version, self._hello.weights)


async def _for_ever() -> None:
    """Until whoever stops the run cancels this."""
    await asyncio.Event().wait()


class _Pace:
    """Seconds and tokens from one optimizer step to the next, over all devices."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.mark()

    def since_last(self) -> float:
        return time.monotonic() - self._began

    def lap(self, trained: float) -> dict[str, float]:
        seconds = max(self.since_last(), 1e-9)
        generated = self._engines.generated - self._generated
        busy = self._engines.busy.seconds - self._busy
        self.mark()
        loads = self._engines.loads.lap()
        engines = {"engine_busy": min(1.0, busy / seconds), **loads} if self._engines.exist else {}
        return {"seconds_step": seconds, **engines, "tokens_per_second": (generated + trained) / seconds}

    def mark(self) -> None:
        self._began = time.monotonic()
        self._generated, self._busy = self._engines.generated, self._engines.busy.seconds
        self._engines.loads.lap()
