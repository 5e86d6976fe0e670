"""What a stack may change in a run that goes on: all but what its weights, books and metrics are made of."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.runtime.launch.runs import describe
from stackrl.runtime.run import RunFolder
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import Problem, StackError
from stackrl.schemas.rules import at
from stackrl.schemas.stack import Stack
from stackrl.schemas.words import show

MEND = "put it back, or start a new run without --resume"


def refuse_changes(run: RunFolder, loaded: LoadedStack, stack: Stack) -> None:
    """Raise StackError where ``run`` cannot go on with ``stack``, which was loaded as ``loaded``."""
    problems = list(_fixed(run.stack(), stack))
    if run.state().attempt:
        problems += _stages(run.stack(), stack, describe(run)["step"])
    if problems:
        raise StackError(loaded.locate(problems))


def _fixed(before: Stack, now: Stack) -> Iterator[Problem]:
    """The model and its tokenizer, the seed, and where the checkpoints are."""
    old, new = before.model_dump(), now.model_dump()
    paths = [("seed",), *(("model", key) for key in old["model"] | new["model"]), ("checkpoint", "path")]
    for path in paths:
        was, is_now = _value(old, path), _value(new, path)
        if was != is_now:
            yield Problem(at(*path), f"the run was made with {show(was)}", MEND)


def _value(data: dict, path: tuple[str, ...]) -> object:
    for key in path:
        data = data.get(key)
    return data


def _stages(before: Stack, now: Stack, done: int) -> Iterator[Problem]:
    """Stages that have begun, ``done`` optimizer steps into the run, keep name and type, and their steps
    where they have ended. The one that is next counts as begun."""
    start = 0
    for index, old in enumerate(before.stages):
        if start > done:
            return
        new = now.stages[index] if index < len(now.stages) else None
        if new is None or (new.name, new.type) != (old.name, old.type):
            what = f"the run has begun the {old.type} stage {old.name} in this place"
            yield Problem(at("stages", index), what, MEND)
        elif done >= start + old.steps:
            if new.steps != old.steps:
                what = f"the run has taken all {old.steps} steps of this stage"
                yield Problem(at("stages", index, "steps"), what, MEND)
        elif new.steps < done - start:
            what = f"the run has taken {done - start} steps of this stage"
            yield Problem(at("stages", index, "steps"), what, f"make it {done - start} or more")
        start += old.steps
