"""Rules over advantages, shaping, curricula and references. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from stackrl.schemas.advantages import compares
from stackrl.schemas.environments import Environment
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack, StageSettings, settings_of, settings_of_environment
from stackrl.schemas.stages import RlStage
from stackrl.schemas.teachers import looks_at_reference

Problems = Iterator[Problem]
_GIVE = "give algorithm.reference: {endpoint: http://…, model: …}"


def _once(rule: Callable[..., Problems]) -> Callable[..., Problems]:
    """The rule, which looks at stage after stage, without what it finds again in the next one."""

    @wraps(rule)
    def found(*looked_at: Stack | Task) -> Problems:
        told: list[Problem] = []
        for problem in rule(*looked_at):
            if problem not in told:
                told.append(problem)
                yield problem

    return found


@_once
def lone_rollouts_are_not_compared(stack: Stack) -> Problems:
    for index, settings in _stages(stack):
        for path, environment in _environments(stack, index, settings):
            own = settings_of_environment(settings, environment)
            if own.group_size > 1 or own.component != "rl" or not compares(own.advantage):
                continue
            what = f"{own.advantage.type} compares the rollouts of a group, and a group has one"
            mend = "say 2 or more, or advantage: {type: rae} or {type: reinforce_plus_plus}"
            own_key = environment.group_size is not None
            where = (*path, "group_size") if own_key else _written(stack, index, "group_size")
            yield Problem(where, what, mend)


@_once
def overlong_begins_above_zero(stack: Stack) -> Problems:
    for index, settings in _stages(stack):
        shaping = settings.algorithm.shaping
        overlong = shaping.overlong if shaping else None
        if overlong is not None and overlong.buffer > overlong.limit:
            path = (*_written(stack, index, "shaping"), "overlong", "buffer")
            what = f"a buffer of {overlong.buffer} tokens does not fit below the limit of {overlong.limit}"
            yield Problem(path, what, f"make it {overlong.limit} or less")


@_once
def curricula_have_a_choice(stack: Stack) -> Problems:
    for index, settings in _stages(stack):
        if settings.algorithm.curriculum is not None and len(settings.environments) < 2:
            what = "there is one environment, so there is nothing to choose between"
            mend = "name several, each with prompts of one difficulty, or remove it"
            yield Problem(_written(stack, index, "curriculum"), what, mend, at_key=True)


@_once
def curricula_see_all_groups(stack: Stack) -> Problems:
    """Solve rates are of groups in batches; refill leaves out those that are always or never solved."""
    for index, settings in _stages(stack):
        if settings.algorithm.curriculum is not None and settings.algorithm.no_signal == "refill":
            what = "it leaves out the groups that are always or never solved, which a curriculum has to count"
            yield Problem(_written(stack, index, "no_signal"), what, "say keep, or remove the curriculum")


@_once
def references_are_there(stack: Stack) -> Problems:
    """Who is punished for leaving a reference, or learns from one, has it."""
    for index, settings in _stages(stack):
        reference, shaping = settings.algorithm.reference, settings.algorithm.shaping
        if shaping is not None and shaping.divergence is not None and reference is None:
            path = (*_written(stack, index, "shaping"), "divergence")
            yield Problem(path, "a divergence is one from a reference model, and there is none", _GIVE)
        for path, environment in _environments(stack, index, settings):
            if environment.component == "ref_kl" and reference is None:
                what = "there is no model that the answers could become like"
                yield Problem((*path, "component"), what, _GIVE)
            if environment.sampled_by == "policy":
                continue
            if reference is None or reference.endpoint is None:
                what = "there is no other model that could write the answers"
                yield Problem((*path, "sampled_by"), what, _GIVE)
            elif environment.component != "ce":
                what = f"{environment.component} needs answers of the policy itself"
                yield Problem((*path, "component"), what, "say component: ce, or sampled_by: policy")


def references_are_looked_at(stack: Stack) -> Problems:
    looked_at: dict[Path, bool] = {}
    for index, settings in _stages(stack):
        if settings.algorithm.reference is not None:
            path = _written(stack, index, "reference")
            looked_at[path] = looked_at.get(path, False) or any(
                looks_at_reference(settings.algorithm, environment.component)
                or environment.sampled_by == "reference"
                for environment in settings.environments
            )
    for path, somebody in looked_at.items():
        if not somebody:
            what = "nothing looks at what it says"
            mend = "say loss: {kl: {}}, shaping: {divergence: …} or component: ref_kl, or remove it"
            yield Problem(path, what, mend, at_key=True)


@_once
def references_are_whole(stack: Stack) -> Problems:
    for index, settings in _stages(stack):
        reference = settings.algorithm.reference
        if reference is None:
            continue
        path = _written(stack, index, "reference")
        if reference.endpoint is not None and reference.model is None:
            mend = "say model: NAME, as the server's /v1/models lists it"
            yield Problem(path, "a server may hold several models, and none is named", mend)
        if reference.endpoint is None:
            for key in ("model", "secret"):
                if getattr(reference, key) is not None:
                    what = "without an endpoint the policy is asked itself, on the run's own engines"
                    yield Problem((*path, key), what, "remove it, or say endpoint: http://…", at_key=True)
            if not reference.demonstration:
                what = "the policy is its own reference, and reads nothing that it did not read before"
                yield Problem(path, what, "say endpoint: http://…, or demonstration: true")


@_once
def references_see_the_same_temperature(stack: Stack) -> Problems:
    """vLLM tells the logprobs of given tokens at temperature 1 alone."""
    for index, settings in _stages(stack):
        if settings.algorithm.reference is None:
            continue
        for path, environment in _environments(stack, index, settings):
            own = settings_of_environment(settings, environment)
            temperature = own.sampling.temperature
            if temperature == 1.0 or not looks_at_reference(settings.algorithm, own.component):
                continue
            changed = environment.sampling is not None and environment.sampling.temperature is not None
            where = (*path, "sampling", "temperature") if changed else _sampling(stack, index)
            what = f"a reference tells logprobs at temperature 1, and these are sampled at {temperature:g}"
            yield Problem(where, what, "say temperature: 1.0")


@_once
def reference_secrets_are_brought(stack: Stack, task: Task) -> Problems:
    """A server's key is in `secrets` or `envs`: nothing else reaches a node."""
    given = [*(task.get("secrets") or ()), *(task.get("envs") or ())]
    for index, settings in _stages(stack):
        reference = settings.algorithm.reference
        if reference is not None and reference.secret and reference.secret not in given:
            path = (*_written(stack, index, "reference"), "secret")
            what = f"{reference.secret} is not brought to where the run is"
            yield Problem(path, what, f"add secrets: {{{reference.secret}: null}}")


def _stages(stack: Stack) -> Iterator[tuple[int, StageSettings]]:
    """The rl stages, by their place, and what holds in them."""
    for index, stage in enumerate(stack.stages):
        if isinstance(stage, RlStage):
            yield index, settings_of(stack, stage)


def _environments(stack: Stack, index: int, settings: StageSettings) -> Iterator[tuple[Path, Environment]]:
    base = at("stages", index, "environments") if stack.stages[index].environments else at("environments")
    for number, environment in enumerate(settings.environments):
        yield (*base, number), environment


def _written(stack: Stack, index: int, key: str) -> Path:
    """Where a key of a stage's algorithm is written: in the stage, or in what it takes it from."""
    change = stack.stages[index].algorithm
    if change is not None and change.says(key):
        return at("stages", index, "algorithm", key)
    return at("algorithm", key)


def _sampling(stack: Stack, index: int) -> Path:
    change = stack.stages[index].sampling
    if change is not None and change.temperature is not None:
        return at("stages", index, "sampling", "temperature")
    return at("sampling", "temperature")
