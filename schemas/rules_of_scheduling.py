"""Rules over what an environment has of its own: groups, sampling. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.environments import Environment
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.rules_of_data import needs_engines
from stackrl.schemas.stack import Stack, StageSettings, settings_of
from stackrl.schemas.stages import RlStage

Problems = Iterator[Problem]
_OF_TRAINING = ("group_size", "advantage")
"""Keys of an environment that say how it is learnt."""


def environments_fit_batches(stack: Stack) -> Problems:
    """A step takes whole groups: the largest must not be more than it is to hold."""
    for path, environment, stages in _learnt(stack):
        batch = min(settings.algorithm.batch_size for settings in stages)
        if environment.group_size is not None and environment.group_size > batch:
            what = (
                f"{environment.group_size} rollouts are more than a step takes, algorithm.batch_size: {batch}"
            )
            mend = f"make it {batch} or less, or raise the batch size"
            yield Problem((*path, "group_size"), what, mend)


def environments_replies_fit(stack: Stack) -> Problems:
    """What an environment changes of `sampling` holds to the engines' length."""
    held = stack.inference.max_model_length
    if not needs_engines(stack):
        return
    learnt = [(path, environment) for path, environment, _ in _learnt(stack)]
    for path, environment in [*learnt, *_evaluated(stack)]:
        longest = environment.sampling.max_tokens if environment.sampling else None
        if longest is not None and longest >= held:
            what = f"a reply of {longest} tokens and its prompt do not fit in {held}"
            mend = "lower it, or raise inference.max_model_length"
            yield Problem((*path, "sampling", "max_tokens"), what, mend)


def evaluations_train_nothing(stack: Stack) -> Problems:
    """How an environment is learnt says nothing where it is not."""
    for path, environment in _evaluated(stack):
        for key in _OF_TRAINING:
            if getattr(environment, key) is not None:
                what = "nothing is learnt from what is evaluated"
                mend = "remove it; evaluate.samples counts the answers to a prompt"
                yield Problem((*path, key), what, mend, at_key=True)
        if environment.component != "rl":
            yield Problem(
                (*path, "component"), "nothing is learnt from what is evaluated", "remove it", at_key=True
            )


def held_out_ones_are_named(stack: Stack) -> Problems:
    """Steps between evaluations of nothing."""
    if stack.evaluate is not None and stack.evaluate.every is not None and not stack.evaluate.environments:
        what = "nothing is held out: what a stage learns is evaluated before and after it alone"
        mend = "name held-out ones under evaluate: environments:, or remove it"
        yield Problem(at("evaluate", "every"), what, mend, at_key=True)


def _learnt(stack: Stack) -> Iterator[tuple[Path, Environment, list[StageSettings]]]:
    """Each environment that rl stages learn, with its path and what holds in those stages."""
    stages = [(index, stage) for index, stage in enumerate(stack.stages) if isinstance(stage, RlStage)]
    shared = [settings_of(stack, stage) for _, stage in stages if not stage.environments]
    for number, environment in enumerate(stack.environments if shared else []):
        yield at("environments", number), environment, shared
    for index, stage in stages:
        for number, environment in enumerate(stage.environments or []):
            yield at("stages", index, "environments", number), environment, [settings_of(stack, stage)]


def _evaluated(stack: Stack) -> Iterator[tuple[Path, Environment]]:
    for number, environment in enumerate(stack.evaluate.environments if stack.evaluate else []):
        yield at("evaluate", "environments", number), environment
