"""A plan beside the run of the same name that is at work: what a launch would do differently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.difference import Entry, differing_keys
from stackrl.runtime.launch.listing import standing_of
from stackrl.runtime.launch.planning.plan import Plan
from stackrl.runtime.run import RunError, RunFolder
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import StackError

_COMPARED = ("device", "nodes", "gpus_per_node", "accelerator", "parallel", "tensor_parallel", "pools")
"""Of a plan; cores and ports are dealt anew at every start."""


@dataclass(frozen=True)
class AtWork:
    """A run, and in what it differs: entries with ``key``, and with ``left`` (the run's) and ``right`` (the
    plan's) where they have such a key."""

    run: str
    differs: list[Entry]


def beside_running(loaded: LoadedStack, made: Plan, runs: Sequence[RunFolder]) -> AtWork | None:
    """``runs``: those of the stack's name. None where none of them is at work; of several, the newest."""
    run = next((run for run in reversed(runs) if _is_at_work(run)), None)
    if run is None:
        return None
    try:
        stack, plan = admit(loaded, here=False)
    except (StackError, RunError):  # as it is now it could not be launched at all
        stack, plan = loaded.stack, asdict(made)
    known = run.read("plan.json")
    return AtWork(
        run.id,
        differing_keys(run.read("stack.json"), json.loads(stack.model_dump_json()))
        + differing_keys(*({"plan": _compared(side)} for side in (known, plan))),
    )


def _is_at_work(run: RunFolder) -> bool:
    try:
        return standing_of(run).status in ("waiting", "starting", "running")
    except (RunError, OSError):  # damaged, or going away
        return False


def _compared(plan: dict[str, Any]) -> dict[str, Any]:
    told = json.loads(json.dumps({key: plan[key] for key in _COMPARED if key in plan}))
    return told | {"pools": {pool.pop("name"): pool for pool in told.get("pools", [])}}
