"""What becomes of an alarm: an event in events.jsonl, a line in the log, a call to whoever is to be told."""

from __future__ import annotations

import logging

from stackrl.runtime.monitor.guards import Alarm, Guards, Record
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.monitor.notify import Notifier
from stackrl.runtime.monitor.records import History, Tail
from stackrl.runtime.run import RunFolder
from stackrl.schemas.stack import Stack

log = logging.getLogger(__name__)


class Alarms:
    """The guards of a run at work. Made when the orchestrator starts, closed before it leaves."""

    def __init__(self, run: RunFolder, stack: Stack, sink: Sink, index: int) -> None:
        """``index``: the optimizer step that the run goes on with; what was normal before it is read back."""
        history = History(run.id, stack, run.state())
        history.add(Tail(run.metrics).read())
        before = [record for record in history.steps if record["index"] < index]
        self._guards = Guards(stack.guards, before)
        self._notifier = Notifier(stack.guards.notify, run.id)
        self._sink = sink

    def after(self, record: Record) -> Alarm | None:
        """Look at a step, as metrics.jsonl has it, and tell what is to be told.

        Returns the alarm that the run is to be stopped for; its `save` says whether the weights may be kept.
        """
        stopping: list[Alarm] = []
        for alarm in self._guards.check(record):
            log.warning("%s: %s", alarm.name, alarm.text)
            self._sink.event(
                "alarm",
                guard=alarm.name,
                action=alarm.action,
                text=alarm.text,
                stage=record["stage"],
                index=record["index"],
                step=record["step"],
            )
            self._notifier.alarm(alarm, record)
            if alarm.action == "stop":
                stopping.append(alarm)
        return min(stopping, key=lambda alarm: alarm.save, default=None)

    def close(self) -> None:
        """Wait, with a limit, until everybody is told."""
        self._notifier.close()
