"""Rules over environments' rewards and secrets. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack
from stackrl.schemas.words import near

Problems = Iterator[Problem]


def rewards_are_known(stack: Stack) -> Problems:
    """A weight of a reward that the environment never gives would change nothing."""
    for path, environment in _environments(stack):
        known = _names(environment.type, environment.args)
        for name in environment.rewards:
            if known and name not in known:
                what = f"{environment.type} has no reward of this name"
                mend = near(name, known) or f"it has {', '.join(known)}"
                yield Problem((*path, "rewards", name), what, mend, at_key=True)


def judges_have_keys(stack: Stack, task: Task) -> Problems:
    """What names a secret in `args` gets it from the run's environment: nothing else reaches a node."""
    brought = {*(task.get("secrets") or {}), *(task.get("envs") or {})}
    for path, environment in _environments(stack):
        for place, name in _secrets(environment.args, (*path, "args")):
            if name not in brought:
                what = f"nothing brings the environment variable {name} to the nodes"
                yield Problem(place, what, f"add secrets: {{{name}: null}}")


def _environments(stack: Stack):
    lists = [(at("environments"), stack.environments)]
    lists += [(at("stages", i, "environments"), s.environments or []) for i, s in enumerate(stack.stages)]
    if stack.evaluate:
        lists.append((at("evaluate", "environments"), stack.evaluate.environments))
    for path, environments in lists:
        for index, environment in enumerate(environments):
            yield (*path, index), environment


def _names(kind: str, args: Mapping[str, Any]) -> list[str]:
    """Rewards of an environment; none where they cannot be known from here."""
    from stackrl.runtime.environments import RUNNABLE

    try:
        return sorted(RUNNABLE[kind].reward_names(args)) if kind in RUNNABLE else []
    except (KeyError, TypeError, AttributeError):
        return []  # its arguments are wrong, which is told of them


def _secrets(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "secret" and isinstance(inner, str):
                yield (*path, key), inner
            yield from _secrets(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _secrets(inner, (*path, index))
