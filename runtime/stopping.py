"""Ends that are asked for: why, and how long they may take."""

from __future__ import annotations

from stackrl.runtime.processes import GUARD_LIMIT, LOST
from stackrl.runtime.run import RunFolder
from stackrl.schemas.limits import Limits

SAVE_SIGNAL = "SIGUSR2"
"""Tells the orchestrator to make a checkpoint at the optimizer step that runs, and to leave."""


class Stopped(Exception):
    """The end of a run that has not failed. ``code``: the exit code of the node program."""

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


def preempted() -> Stopped:
    return Stopped("the machine is being taken away (preemption notice)", LOST)


def out_of_hours(hours: float) -> Stopped:
    return Stopped(f"stopped after {hours:g} h of work, its limit (limits.hours)")


def out_of_money(cost: float) -> Stopped:
    return Stopped(f"stopped after ${cost:,.2f}, its limit (limits.cost)")


def longest_end(run: RunFolder) -> float:
    """Seconds within which the node program of ``run`` ends after it was told to, a last checkpoint
    included."""
    return _longest(run.stack().limits)


def _longest(limits: Limits) -> float:
    return limits.stop_seconds + GUARD_LIMIT
