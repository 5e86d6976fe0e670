"""Rules over environments that lead their rollouts in worker processes. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.environments import Environment
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]
_OF_PACKAGES = ("id", "version", "python", "agent")
"""Keys that only packages for verifiers have."""


def packages_are_named(stack: Stack) -> Problems:
    for path, environment in environments_of(stack):
        if environment.type == "verifiers":
            if environment.id is None:
                what = "the key id is missing: it names the package"
                yield Problem((*path, "id"), what, "say id: OWNER/NAME, as the Environments Hub does", True)
            continue
        for key in _OF_PACKAGES:
            if getattr(environment, key):
                what = f"{environment.type} is no package for verifiers"
                yield Problem((*path, key), what, "remove it, or say type: verifiers", at_key=True)


def packages_do_not_collide(stack: Stack) -> Problems:
    """Two owners' packages of one name are one module to Python, whichever was installed last."""
    ids: dict[tuple[str, str | None], str] = {}
    versions: dict[tuple[str, str | None], str] = {}
    for path, environment in environments_of(stack):
        if environment.id is None:
            continue
        name = environment.id.rpartition("/")[2].replace("-", "_").lower()
        module, version = (name, environment.python), environment.version
        mend = "give one of them a python: of its own"
        if (other := ids.setdefault(module, environment.id)) != environment.id:
            what = f"{other} and {environment.id} are the same module {name!r} to one Python"
            yield Problem((*path, "id"), what, mend)
        elif version and (other := versions.setdefault(module, version)) != version:
            what = f"{environment.id} is asked for in version {other} too, of the same Python"
            yield Problem((*path, "version"), what, mend)


def workers_have_work(stack: Stack) -> Problems:
    """Most environments reply inside the orchestrator."""
    for path, environment in environments_of(stack):
        if environment.workers > 1 and not may_lead(environment.type):
            what = f"{environment.type} does not lead its rollouts, so it has no workers"
            yield Problem((*path, "workers"), what, "remove it", at_key=True)


def environments_of(stack: Stack) -> Iterator[tuple[Path, Environment]]:
    """All environments of a stack, and where each is written."""
    lists = [(at("environments"), stack.environments)]
    lists += [(at("stages", i, "environments"), s.environments or []) for i, s in enumerate(stack.stages)]
    if stack.evaluate:
        lists.append((at("evaluate", "environments"), stack.evaluate.environments))
    for path, environments in lists:
        for index, environment in enumerate(environments):
            yield (*path, index), environment


def may_lead(kind: str) -> bool:
    """Whether an environment of that type can lead its rollouts; what one's own does is not known here."""
    if kind in ("swe", "verifiers", "python"):
        return True
    from stackrl.runtime.environments import RUNNABLE
    from stackrl.runtime.environments.base import AgentEnvironment

    return kind in RUNNABLE and issubclass(RUNNABLE[kind], AgentEnvironment)
