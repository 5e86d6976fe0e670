"""The last checks between a stack that is right and a run that is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from stackrl.runtime.launch.front import refusals
from stackrl.runtime.launch.plan import Machine, Plan, lacking, make_plan
from stackrl.runtime.run import RunError
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import StackError
from stackrl.schemas.stack import Stack

Planner = Callable[[LoadedStack], Plan]


def admit(loaded: LoadedStack, planner: Planner = make_plan) -> tuple[Stack, dict[str, Any]]:
    """What the folder of a run here needs: the stack with its derived device, and the plan as data.

    Raises StackError with everything that the stack asks for and this version cannot do, and RunError where
    this machine is not what the plan needs.
    """
    if problems := refusals(loaded):
        raise StackError(problems)
    plan = planner(loaded)
    if lack := lacking(plan, Machine.here()):
        raise RunError(f"{lack}; start it where it fits, for example with `sky launch {loaded.path}`")
    return loaded.stack.model_copy(update={"device": plan.device}), asdict(plan)
