"""Who is started again after a failure, when, and when no more. Pure: nothing is started or ended here.

An engine is started again alone. The orchestrator is, too, the first time; a trainer rank's end, or the
orchestrator's second one without an optimizer step in between, starts all ranks and the orchestrator again
under a new incarnation. What fails again and again waits longer each time, and in the end nothing is started
any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

LONGEST_PAUSE = 60.0
"""Seconds."""
BAD_INPUT = 2
"""Exit code of a process whose input is wrong: trying again does not help."""
STOPPED_BY_GUARD = 3
"""Exit code of an orchestrator whose stack says that the run is to end here."""
_WORKERS = "orchestrator and trainer"


@dataclass(frozen=True)
class Failure:
    """A process that ended before its work was done. ``reason``: who, how, and in its own words why."""

    process: str
    reason: str
    exit: int = 1


@dataclass(frozen=True)
class Restart:
    """Processes that are ended now and started again at ``at`` (monotonic)."""

    processes: tuple[str, ...]
    new_incarnation: bool
    count: int
    """How many times in a row."""
    at: float
    reason: str


class GivenUp(Exception):
    """Nothing is started again any more. The text says what failed, and how often."""


class Restarts:
    """The decisions of one attempt."""

    def __init__(self, engines: Collection[str], orchestrator: str, ranks: Sequence[str], limit: int) -> None:
        """``limit``: how many times in a row, without an optimizer step in between."""
        self._engines, self._orchestrator, self._workers = engines, orchestrator, (*ranks, orchestrator)
        self._limit = limit
        self._counts: Counter[str] = Counter()
        self._orchestrator_failed = False
        self._pending: dict[str, Restart] = {}
        self._furthest: int | None = None

    @property
    def pending(self) -> Collection[str]:
        """Processes that wait for their start."""
        return {process for restart in self._pending.values() for process in restart.processes}

    def failed(self, failure: Failure, now: float, done: Collection[str] = ()) -> Restart | None:
        """Decide what a failure means; None where the process waits for its start anyway.

        ``done`` are processes whose work is done. Raises GivenUp.
        """
        if failure.exit == BAD_INPUT:
            raise GivenUp(f"{failure.reason} (exit code 2: it would not get better by trying again)")
        if failure.exit == STOPPED_BY_GUARD and failure.process == self._orchestrator:
            raise GivenUp(failure.reason)
        if failure.process in self.pending:
            return None
        unit = failure.process if failure.process in self._engines else _WORKERS
        before = self._pending.pop(unit, None)
        if before is None:
            self._counts[unit] += 1
        if (count := self._counts[unit]) > self._limit:
            times = f" ({count} failures in a row, with no optimizer step in between)" if self._limit else ""
            raise GivenUp(f"{failure.reason}{times}")
        processes, all_workers = self._meant(failure.process, done, again=before is not None)
        at = now + min(2.0 ** (count - 1), LONGEST_PAUSE)
        self._pending[unit] = Restart(processes, all_workers, count, at, failure.reason)
        return self._pending[unit]

    def leave(self, process: str) -> None:
        """An engine that nobody starts again."""
        self._pending.pop(process, None)
        self._counts.pop(process, None)

    def due(self, now: float) -> list[Restart]:
        """Take what is to be started now."""
        found = {unit: restart for unit, restart in self._pending.items() if restart.at <= now}
        for unit in found:
            del self._pending[unit]
        return list(found.values())

    def seconds_left(self, now: float) -> float:
        """Until the next start."""
        return max(0.0, min((restart.at for restart in self._pending.values()), default=math.inf) - now)

    def progressed(self, index: int) -> None:
        """The run is at optimizer step ``index``. Only what no step before had reached counts as progress:
        repeating the way from a checkpoint to the same end is none."""
        if self._furthest is not None and index > self._furthest:
            self._counts.clear()
            self._orchestrator_failed = False
        self._furthest = index if self._furthest is None else max(index, self._furthest)

    def _meant(self, process: str, done: Collection[str], *, again: bool) -> tuple[tuple[str, ...], bool]:
        """The processes that ``process`` takes with it, and whether an incarnation ends."""
        if process in self._engines:
            return (process,), False
        alone = process == self._orchestrator and not (again or self._orchestrator_failed)
        self._orchestrator_failed |= process == self._orchestrator
        if alone and not any(rank in done for rank in self._workers):
            return (process,), False
        return self._workers, True
