"""The wish that a run ends before its last step: whoever has it asks, the loop does it between two steps."""

from __future__ import annotations

import asyncio

from stackrl.runtime.monitor.guards import Alarm
from stackrl.runtime.orchestrator.errors import GuardStop


class Stop:
    """Asked for once or several times, by the node program or by guards."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._alarm: Alarm | None = None

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def reason(self) -> str:
        """What the trainer is told."""
        return f"guard {self._alarm.name}" if self._alarm else "stopped"

    @property
    def save(self) -> bool:
        """Whether the weights are worth a checkpoint."""
        return self._alarm is None or self._alarm.save

    def ask(self, alarm: Alarm | None = None) -> None:
        """End the run after the step that runs; ``alarm``: because a guard says so."""
        self._alarm = alarm or self._alarm
        self._asked.set()

    async def wait(self) -> None:
        """Until somebody asks."""
        await self._asked.wait()

    def raise_alarm(self) -> None:
        """Raises GuardStop where it was a guard that asked."""
        if self._alarm is not None:
            raise GuardStop(f"guard {self._alarm.name}: {self._alarm.text}")
