"""One optimizer step, seen from the orchestrator: seal, hand over, wait, record, and cut checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchServer
from stackrl.runtime.transport.messages import Hello, Sample
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import Stage

FETCH_LIMIT = 600.0
"""Seconds within which every rank takes a batch that is offered, once it has saved what it must."""
STEP_LIMIT = 7200.0
"""Seconds that an optimizer step with the publication of its weights may take."""
SAVE_LIMIT = 7200.0
"""Seconds that the trainer's part of a checkpoint may take."""
END_LIMIT = 600.0
"""Seconds within which every rank hears that the run is over."""


@dataclass
class Work:
    """What one optimizer step is made of. ``record`` are the metrics that are known before it."""

    stage: Stage
    stage_step: int
    samples: Sequence[Sample]
    groups: Sequence[int] = ()
    record: dict[str, Any] = field(default_factory=dict)


class Training:
    """The trainer, one optimizer step at a time."""

    def __init__(
        self,
        run: RunFolder,
        stack: Stack,
        server: BatchServer,
        journal: Journal,
        engines: Engines,
        sink: Sink,
        layout: Layout,
        hello: Hello,
        tasks: asyncio.TaskGroup,
    ) -> None:
        position = journal.position()
        self.index, self.step = position.index, position.step
        """Optimizer steps taken, and those of RL among them."""
        self.version = hello.version
        """Of the weights after the last step."""
        self._incarnation, self._source = hello.incarnation, hello.weights
        self._checkpoints, self._keep = run.checkpoints(stack), stack.checkpoint.keep
        self._every = stack.checkpoint.every
        self._end = sum(stage.steps for stage in stack.stages)
        self._published_from = sum(stage.steps for stage in stack.stages if stage.type == "supervised")
        self._server, self._journal, self._engines, self._sink = server, journal, engines, sink
        self._layout, self._tasks = layout, tasks
        self._saving: list[asyncio.Task[None]] = []
        self._completing = asyncio.Lock()
        self._trainer_saves = False
        """Whether the trainer writes a checkpoint before it asks for the next batch."""
        self._pace = _Pace(engines)
        self._update_engines()

    async def take(self, work: Work) -> None:
        """One optimizer step. Returns when it is applied, written down and recorded."""
        place = self._place(work)
        waited = self._pace.since_last()
        self._journal.seal(place, work.stage.type, work.groups)
        await self._server.offer(build(work.samples, place, self._layout))
        if self._trainer_saves:
            await self._server.durable(self.index - 1, SAVE_LIMIT)
        ack = await self._server.applied(fetch=FETCH_LIMIT, step=STEP_LIMIT)
        self._journal.apply(place.index)
        self.index += 1
        if work.stage.type == "rl":
            self.step += 1
        self.version = ack.version
        self._trainer_saves = place.checkpoint
        if place.checkpoint:
            self._cut()
        self._update_engines()
        trainer = {f"trainer/{name}": value for name, value in ack.metrics.items()}
        pace = self._pace.lap(trained=ack.metrics.get("tokens_packed", 0))
        self._sink.log(
            {
                "kind": work.stage.type,
                "stage": place.stage,
                "stage_step": place.stage_step,
                "stage_steps": work.stage.steps,
                "index": place.index,
                "step": place.step,
                **work.record,
                "seconds_rollouts_wait": waited,
                **pace,
                **trainer,
            }
        )

    def restart_clock(self) -> None:
        """What was done since the last step is no part of the next one: an evaluation, or a start."""
        self._pace.mark()

    async def finish(self) -> None:
        """Wait for the last checkpoint, then let the trainer go."""
        await asyncio.gather(*self._saving)
        await self._server.end("finished", END_LIMIT)

    def _place(self, work: Work) -> Place:
        done = self.index + 1
        return Place(
            incarnation=self._incarnation,
            index=self.index,
            step=self.step,
            stage=work.stage.name,
            stage_step=work.stage_step,
            checkpoint=done % self._every == 0 or done == self._end,
            last_of_stage=work.stage_step + 1 == work.stage.steps,
        )

    def _update_engines(self) -> None:
        """Until supervised stages are over, the trainer publishes nothing."""
        if self.index >= self._published_from:
            self._engines.aim(self.version, self._source)

    def _cut(self) -> None:
        """The journal of this very moment belongs to the checkpoint; the trainer's part follows."""
        checkpoint = checkpoints.folder(self._checkpoints, self.index)
        self._journal.snapshot(checkpoint / "orchestrator" / "journal.sqlite")
        self._saving.append(self._tasks.create_task(self._complete(self.index)))

    async def _complete(self, index: int) -> None:
        """Declare the checkpoint that resumes at ``index`` complete once the trainer's part is on disk.

        One at a time and in order: hashing may take longer than the way to the next checkpoint.
        """
        async with self._completing:
            await self._server.durable(index - 1, SAVE_LIMIT)
            checkpoint = checkpoints.folder(self._checkpoints, index)
            facts = {"index": index, "incarnation": self._incarnation}
            await asyncio.to_thread(checkpoints.write_manifest, checkpoint, facts)
            self._journal.make_durable(index - 1)
            await asyncio.to_thread(checkpoints.prune, self._checkpoints, self._keep)
            self._sink.event("checkpoint", index=index, path=str(checkpoint))


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
        return {
            "seconds_step": seconds,
            "engine_busy": min(1.0, busy / seconds),
            "tokens_per_second": (generated + trained) / seconds,
        }

    def mark(self) -> None:
        self._began = time.monotonic()
        self._generated, self._busy = self._engines.generated, self._engines.busy.seconds
