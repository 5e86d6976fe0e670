"""How far the run is, in words and numbers, for the heartbeat of the orchestrator's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stackrl.runtime import heartbeat


class Progress:
    """What the node program learns of the orchestrator: from it, it tells work from standstill."""

    def __init__(self, index: int, checkpoint: int) -> None:
        """``index``: optimizer steps behind the run; ``checkpoint``: index of the newest complete one."""
        self._doing = "starting"
        self._facts: dict[str, Any] = {"index": index, "checkpoint": checkpoint, "finished": 0}
        self._tell()

    def doing(self, what: str) -> None:
        """Say what is waited for or done now, such as `waiting for rollouts of step 12`."""
        self._doing = what
        self._tell()

    def rollout_finished(self) -> None:
        self._facts["finished"] += 1
        self._tell()

    def rows_read(self, doing: str) -> None:
        """More rows of the run's data were looked at, which is no standstill."""
        self._facts["finished"] += 1
        self.doing(doing)

    def stepped(self, index: int) -> None:
        self._facts["index"] = index
        self._tell()

    def saved(self, index: int) -> None:
        self._facts["checkpoint"] = index
        self._tell()

    def uses(self, engines: Sequence[str]) -> None:
        """The URLs of the engines that are asked for anything."""
        self._facts["engines"] = list(engines)
        self._tell()

    def _tell(self) -> None:
        heartbeat.note(self._doing, **self._facts)
