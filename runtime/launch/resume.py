"""What a stack may change in a run that goes on: all but what its weights, books and metrics are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.listing import describe
from stackrl.runtime.run import RunFolder
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import Problem, StackError
from stackrl.schemas.rules import at
from stackrl.schemas.stack import Stack
from stackrl.schemas.words import show

MEND = "put it back, or start a new run without --resume"
MODEL = ("model",)
"""What no checkpoint fits any more when it changes: the model and its tokenizer."""
BOOKS = (("seed",), ("checkpoint", "path"))
"""What the books of the run and the place of its checkpoints are made of."""


def refuse_changes(run: RunFolder, loaded: LoadedStack, stack: Stack) -> None:
    """Raise StackError where ``run`` cannot go on with ``stack``, which was loaded as ``loaded``."""
    before = run.stack()
    problems = list(fixed(before, stack, (MODEL, *BOOKS), MEND))
    if run.state().attempt:
        problems += begun_stages(before, stack, describe(run)["step"], MEND, next_too=True)
    if problems:
        raise StackError(loaded.locate(problems))


def refuse_against_checkpoint(checkpoint: Path, loaded: LoadedStack, stack: Stack) -> None:
    """The same for a run of which only ``checkpoint`` is left."""
    before = Stack.model_validate_json((checkpoint / checkpoints.BOOKS / "stack.json").read_bytes())
    problems = list(fixed(before, stack, (MODEL, *BOOKS), MEND))
    problems += begun_stages(before, stack, checkpoints.index_of(checkpoint), MEND, next_too=True)
    if problems:
        raise StackError(loaded.locate(problems))


def fixed(before: Stack, now: Stack, sections: Sequence[tuple[str, ...]], mend: str) -> Iterator[Problem]:
    """What has changed in ``sections``; in a mapping, each key that has."""
    old, new = before.model_dump(), now.model_dump()
    for section in sections:
        was, is_now = _value(old, section), _value(new, section)
        both = isinstance(was, dict) and isinstance(is_now, dict)
        for path in [(*section, key) for key in was | is_now] if both else [section]:
            was, is_now = _value(old, path), _value(new, path)
            if was != is_now:
                yield Problem(at(*path), f"the run was made with {show(was)}", mend)


def _value(data: dict, path: tuple[str, ...]) -> object:
    for key in path:
        data = data.get(key)
    return data


def begun_stages(before: Stack, now: Stack, done: int, mend: str, *, next_too: bool) -> Iterator[Problem]:
    """Stages that have begun, ``done`` optimizer steps into the run, keep name and type, and their steps
    where they have ended. ``next_too``: the one that is next counts as begun, and the one before it as over;
    else that one may go on."""
    start = 0
    for index, old in enumerate(before.stages):
        if start > done or (start == done and not next_too):
            return
        new = now.stages[index] if index < len(now.stages) else None
        if new is None or (new.name, new.type) != (old.name, old.type):
            what = f"the run has begun the {old.type} stage {old.name} in this place"
            yield Problem(at("stages", index), what, mend)
        elif done > start + old.steps or (done == start + old.steps and next_too):
            if new.steps != old.steps:
                what = f"the run has taken all {old.steps} steps of this stage"
                yield Problem(at("stages", index, "steps"), what, mend)
        elif new.steps < done - start:
            what = f"the run has taken {done - start} steps of this stage"
            yield Problem(at("stages", index, "steps"), what, f"make it {done - start} or more")
        start += old.steps
