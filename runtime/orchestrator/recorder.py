"""What a run tells about itself: metrics, rollouts for the report, alarms, and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stackrl.runtime.monitor.alarms import Alarms
from stackrl.runtime.monitor.guards import Alarm
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.monitor.rollouts import RolloutLog
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import FinishedGroup
from stackrl.runtime.orchestrator.progress import Progress
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.messages import Logprobs, Sample
from stackrl.schemas.stack import Stack


class Recorder:
    """Everything that takes a step's numbers. Close it before the process leaves."""

    def __init__(
        self,
        run: RunFolder,
        stack: Stack,
        sink: Sink,
        rollouts: RolloutLog,
        index: int,
        checkpoint: int,
    ) -> None:
        """``index``: the next optimizer step; ``checkpoint``: index of the newest complete one."""
        self._sink = sink
        self._rollouts = rollouts
        self._alarms = Alarms(run, stack, sink, index)
        self.event = sink.event
        self.progress = Progress(index, checkpoint)

    def wants_logprobs(self, kind: str, step: int) -> bool:
        """Whether the trainer is to report its logprobs of a batch."""
        return kind == "rl" and self._rollouts.wanted(step)

    def sealed(self, place: Place, groups: Sequence[FinishedGroup], samples: Sequence[Sample]) -> None:
        if place.report:
            self._rollouts.add(place.index, place.step, place.stage, groups, samples)

    def logprobs(self, message: Logprobs) -> None:
        self._rollouts.add_logprobs(message.index, message.documents, message.lengths, message.logprobs)

    def stepped(self, record: dict[str, Any]) -> Alarm | None:
        """Write a step down. Returns the alarm that the run is to be stopped for."""
        self._sink.log(record)
        self.progress.stepped(record["index"] + 1)
        return self._alarms.after(record)

    async def close(self) -> None:
        """Wait, with a limit, until everybody is told of the alarms."""
        await asyncio.to_thread(self._alarms.close)
