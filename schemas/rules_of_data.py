"""Rules over what stages learn from, and over runs without engines. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.problems import Problem, at
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import RlStage, SupervisedStage

Problems = Iterator[Problem]


def needs_engines(stack: Stack) -> bool:
    """Whether anything of the run samples."""
    return any(isinstance(stage, RlStage) for stage in stack.stages)


def stages_have_a_length(stack: Stack) -> Problems:
    for index, stage in enumerate(stack.stages):
        if not isinstance(stage, SupervisedStage):
            continue
        path = at("stages", index)
        if stage.epochs is not None and stage.data is None:
            what = "environments draw demonstrations without end: there are no epochs"
            yield Problem((*path, "epochs"), what, "say steps instead", at_key=True)
        elif stage.epochs is not None and stage.steps is not None:
            yield Problem((*path, "epochs"), "steps are given too", "remove one of the two", at_key=True)
        elif stage.data is None and stage.steps is None:
            yield Problem(path, "a stage without data needs a number of steps", "say steps: 100, for example")


def stages_learn_from_one_source(stack: Stack) -> Problems:
    for index, stage in enumerate(stack.stages):
        path = at("stages", index)
        if isinstance(stage, SupervisedStage) and stage.data is not None:
            for key in ("environments", "noise", "clean_steps"):
                if getattr(stage, key):
                    what = "this key is for the demonstrations of environments, and the stage has data"
                    yield Problem((*path, key), what, "remove it, or remove data", at_key=True)
        elif not (stage.environments or stack.environments):
            data = "" if isinstance(stage, RlStage) else ", or give it data"
            mend = f"name some under environments: in the stack or in the stage{data}"
            yield Problem(path, f"stage {stage.name} has no environments to learn from", mend)


def validation_has_one_source(stack: Stack) -> Problems:
    for index, stage in enumerate(stack.stages):
        if not isinstance(stage, SupervisedStage) or (validation := stage.validation) is None:
            continue
        path = at("stages", index, "validation")
        if stage.data is None:
            what = "only stages with data have held-out rows"
            yield Problem(path, what, "remove it, or give the stage data", at_key=True)
        elif (validation.path is None) == (validation.share is None):
            what = "both path and share are given" if validation.path else "it says nothing of its rows"
            yield Problem(path, what, "give exactly one of path and share: 0.05, for example", at_key=True)


def evaluations_need_engines(stack: Stack) -> Problems:
    if stack.evaluate is not None and not needs_engines(stack):
        what = "environments are evaluated during rl stages, and there is none"
        yield Problem(
            at("evaluate"), what, "remove it; held-out rows go under a stage's validation:", at_key=True
        )
