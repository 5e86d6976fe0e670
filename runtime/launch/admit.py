"""The last checks between a stack that is right and a run that is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stackrl.runtime.launch.backends import choices
from stackrl.runtime.launch.epochs import counted
from stackrl.runtime.launch.front import look, refusals
from stackrl.runtime.launch.planning.plan import Machine, Plan, lacking, make_plan
from stackrl.runtime.run import RunError
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.model import PretrainedModel
from stackrl.schemas.problems import StackError
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import Stage, SupervisedStage

Planner = Callable[[LoadedStack], Plan]


def admit(
    loaded: LoadedStack, planner: Planner = make_plan, *, here: bool = True
) -> tuple[Stack, dict[str, Any]]:
    """What the folder of a run needs: the stack with its derived device, the steps of its data, and absolute
    folders, and the plan as data.

    ``here``: whether it is to work on this machine, else on machines that a backend gets.

    Raises StackError with everything that the stack asks for and this version cannot do, or with data that is
    not there, and RunError where this machine is not what the plan needs.
    """
    if problems := refusals(loaded):
        raise StackError(problems)
    if here and (missing := [one for looked in look(loaded) for one in looked.errors + looked.absent]):
        raise StackError(missing)
    plan = planner(loaded)
    if here and (lack := lacking(plan, Machine.here())):
        raise RunError(f"{lack}; start it where it fits: {choices(loaded.path, loaded.task)}")
    try:
        stack = counted(_anchored(loaded.stack))
    except StackError as error:
        raise StackError(loaded.locate(error.problems)) from None
    return stack.model_copy(update={"device": plan.device}), asdict(plan)


def _anchored(stack: Stack) -> Stack:
    """``stack`` with its folders as absolute paths: every attempt means the same, wherever it starts from."""
    changes: dict[str, Any] = {}
    if stack.checkpoint.path:
        changes["checkpoint"] = stack.checkpoint.model_copy(update={"path": _absolute(stack.checkpoint.path)})
    if getattr(stack.weights, "path", None):
        changes["weights"] = stack.weights.model_copy(update={"path": _absolute(stack.weights.path)})
    if isinstance(stack.model, PretrainedModel) and Path(stack.model.id).expanduser().is_dir():
        changes["model"] = stack.model.model_copy(update={"id": _absolute(stack.model.id)})
    changes["stages"] = [_anchored_stage(stage) for stage in stack.stages]
    return stack.model_copy(update=changes)


def _anchored_stage(stage: Stage) -> Stage:
    if not isinstance(stage, SupervisedStage):
        return stage
    changes = {
        key: part.model_copy(update={"path": _all_absolute(part.path)})
        for key in ("data", "validation")
        if (part := getattr(stage, key)) is not None and part.path is not None
    }
    return stage.model_copy(update=changes)


def _all_absolute(paths: str | list[str]) -> str | list[str]:
    return _absolute(paths) if isinstance(paths, str) else [_absolute(path) for path in paths]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
