"""What the machines of a run cost: noted per hour when it is launched, told and limited while it works."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stackrl.runtime.launch.handle import FILE, Handle
from stackrl.runtime.launch.planning.prices import dollars
from stackrl.runtime.preemption import watched
from stackrl.runtime.run import RunError, RunFolder, State
from stackrl.schemas.limits import Limits

HOURLY_VARIABLE = "STACKRL_HOURLY"
"""Dollars per hour of all machines of a run: a backend tells it to the node program, which may be where
handle.json is not, and a person may, for machines that no catalog knows."""


def hourly_said(environment: Mapping[str, object]) -> float | None:
    """Dollars per hour as the environment says; None where it does not. Raises RunError for no number."""
    said = environment.get(HOURLY_VARIABLE)
    if said is None or not (text := str(said).strip()):
        return None
    try:
        hourly = float(text.removeprefix("$"))
    except ValueError:
        hourly = math.nan
    if not 0 <= hourly < math.inf:
        raise RunError(
            f"{HOURLY_VARIABLE} is {text!r}, not dollars per hour of all machines; write it as in 98.32"
        )
    return hourly


def hourly_noted(limits: Limits, environment: Mapping[str, object], priced: float | None) -> float | None:
    """Dollars per hour of all machines, as a launch notes them: what the stack's ``environment`` says, else
    ``priced``. Raises RunError where a limit in dollars could not be held, before anything costs any."""
    said = hourly_said(environment)
    hourly = priced if said is None else said
    if limits.cost is not None and hourly is None:
        raise RunError(_unpriced(limits.cost))
    return hourly


def hourly_on_node(run: RunFolder, environment: Mapping[str, str]) -> float | None:
    """Dollars per hour of all machines of ``run``, for the node program that works on it; None: unknown."""
    if (said := hourly_said(environment)) is not None:
        return said
    if (run.path / FILE).exists():
        return Handle.of(run).hourly
    return None if watched(environment) else 0.0  # rented by SkyPilot, else nobody's but the user's


def cost_so_far(state: State, handle: Handle, now: float) -> float | None:
    """Dollars that the machines of a run have cost; None where their price is unknown.

    Machines of a cloud cost money from the launch to their end, others while a node program works.
    """
    if handle.hourly is None:
        return None
    seconds = state.used
    if handle.backend == "sky":
        seconds = max(seconds, (handle.ended or now) - handle.submitted)
    return handle.hourly * seconds / 3600


def refuse_spent(run: RunFolder, limits: Limits, environment: Mapping[str, str]) -> None:
    """Raises RunError on a node where ``run`` has cost what it may, or where nobody could tell."""
    if limits.cost is None:
        return
    hourly, used = hourly_on_node(run, environment), run.state().used
    if hourly is None:
        raise RunError(_unpriced(limits.cost))
    if spent(limits, hourly, used):
        raise RunError(
            f"run {run.id} has cost {dollars(hourly * used / 3600)} of its {dollars(limits.cost)} "
            f"(limits.cost); to give it more: "
            f"`stackrl launch FILE --resume {run.id} --set limits.cost={math.ceil(2 * limits.cost)}`"
        )


def _unpriced(cost: float) -> str:
    return (
        f"the run is to end at {dollars(cost)} (limits.cost), but nothing says what its machines cost; write "
        f"`envs: {{{HOURLY_VARIABLE}: …}}`, dollars per hour of all of them, or limits.hours instead"
    )


def spent(limits: Limits, hourly: float | None, used: float) -> bool:
    """Whether a run that has worked for ``used`` seconds has cost what it may."""
    return limits.cost is not None and hourly is not None and hourly * used / 3600 >= limits.cost


def told(cost: float | None, hourly: float | None) -> str:
    """For people: `$12.40`, `unknown`, or nothing where nobody asks for money."""
    if cost is None or hourly is None:
        return "unknown"
    return dollars(cost) if hourly else ""
