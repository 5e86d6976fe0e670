"""Rules over optimizers and schedules, and what stages change of them. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stackrl.schemas.base import Model
from stackrl.schemas.changes import Change
from stackrl.schemas.optimizers import OPTIMIZERS, SGD
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.schedules import SCHEDULES, ConstantSchedule, WarmupStableDecaySchedule, decay_steps
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import Stage
from stackrl.schemas.words import choice

Problems = Iterator[Problem]


def changes_belong(stack: Stack) -> Problems:
    """What a stage changes of an optimizer or a schedule is something that this one has.

    Where it is not, the stage has no settings: all other rules wait.
    """
    base = stack.trainer.optimizer
    for index, stage in enumerate(stack.stages):
        if (change := stage.optimizer) is None:
            continue
        path = at("stages", index, "optimizer")
        yield from _foreign(change, base.type, OPTIMIZERS, path)
        if change.schedule is not None:
            same = change.type in (None, base.type)
            schedule = base.schedule.type if same else _type_of(ConstantSchedule)
            yield from _foreign(change.schedule, schedule, SCHEDULES, (*path, "schedule"))


def _foreign(change: Change, current: str, models: Iterable[type[Model]], path: Path) -> Problems:
    """Keys of ``change`` that the type it is for (its own, else ``current``) does not have."""
    kinds = {_type_of(model): model for model in models}
    kind = change.type or current
    for key in change.model_dump(exclude_none=True):
        if key not in kinds[kind].model_fields:
            owners = choice([name for name, model in kinds.items() if key in model.model_fields])
            what = f"this stage's {path[-1]} is {kind}, which has no such key"
            yield Problem((*path, key), what, f"remove it, or say type: {owners} here", at_key=True)


def _type_of(model: type[Model]) -> str:
    return model.model_fields["type"].annotation.__args__[0]


def schedules_fit(stack: Stack) -> Problems:
    """Warmup and decay find room in each stage."""
    for index, stage in enumerate(stack.stages):
        optimizer = settings_of(stack, stage).optimizer
        warmup, schedule = optimizer.warmup_steps, optimizer.schedule
        path = set_here(stage, index, "warmup_steps")
        if stage.steps is None:  # counted in its data when the run is made, and checked then
            continue
        if warmup > stage.steps:
            what = f"{warmup} warmup steps, but stage {stage.name} has {stage.steps} steps"
            yield Problem(path, what, "lower the warmup steps")
        elif isinstance(schedule, WarmupStableDecaySchedule):
            decay = decay_steps(schedule.decay_share, stage.steps)
            if warmup + decay > stage.steps:
                what = f"{warmup} warmup steps and {decay} of decay, but stage {stage.name} has {stage.steps}"
                yield Problem(path, what, "lower the warmup steps, or schedule.decay_share")


def nesterov_has_momentum(stack: Stack) -> Problems:
    what, mend = "a look ahead needs momentum, which is 0", "say momentum: 0.9, or remove it"
    for index, stage in enumerate(stack.stages):
        optimizer = settings_of(stack, stage).optimizer
        if isinstance(optimizer, SGD) and optimizer.nesterov and not optimizer.momentum:
            changed = stage.optimizer is not None
            path = set_here(stage, index, "nesterov") if changed else at("trainer", "optimizer", "nesterov")
            yield Problem(path, what, mend)


def set_here(stage: Stage, index: int, key: str) -> Path:
    """Where ``key`` of a stage's optimizer is written: in the stage, or in what it takes it from."""
    change = stage.optimizer
    if change is not None and getattr(change, key) is not None:
        return at("stages", index, "optimizer", key)
    return at("stages", index)
