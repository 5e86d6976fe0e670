"""Whether this machine can run the packages for verifiers that a stack names, before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from stackrl.runtime.environments.workers.parties import WorkerRefused
from stackrl.runtime.environments.workers.remote import verifiers_program
from stackrl.runtime.environments.workers.worker import Worker
from stackrl.schemas.environments import Environment
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import Path, Problem
from stackrl.schemas.rules_of_workers import environments_of
from stackrl.schemas.stack import Stack

LIMIT = 180.0
"""Seconds for one package: verifiers alone takes up to twenty to be imported."""
AT_ONCE = 2
"""Packages that are looked at side by side."""
_ABSENT = ("python", "id")
"""Keys whose problems another machine need not have: there the package may be installed."""


@dataclass(frozen=True)
class Looked:
    """What was found of the packages of a stack."""

    errors: list[Problem]
    absent: list[Problem]
    """What is not installed on this machine."""
    told: list[str]
    """A line on each package that can be run."""


def look(loaded: LoadedStack) -> Looked:
    """Start a worker for each package, which loads its tasks, and end it. Nothing is installed."""
    packages = list(_packages(loaded.stack))
    results = asyncio.run(_look_at_all([environment for _, environment in packages]))
    looked = Looked([], [], [])
    for (path, environment), result in zip(packages, results, strict=True):
        if isinstance(result, str):
            looked.told.append(result)
            continue
        key = result.key or "id"
        written = key in environment.model_fields_set
        problem = Problem((*path, key) if written else path, result.what, result.mend)
        (looked.absent if key in _ABSENT else looked.errors).extend(loaded.locate([problem]))
    return looked


def _packages(stack: Stack) -> Iterator[tuple[Path, Environment]]:
    """Each package once, where it is asked for in the same way."""
    seen = set()
    for path, environment in environments_of(stack):
        if environment.type == "verifiers":
            same = str([getattr(environment, key) for key in ("id", "version", "python", "args", "agent")])
            if same not in seen:
                seen.add(same)
                yield path, environment


async def _look_at_all(environments: list[Environment]) -> list[str | WorkerRefused]:
    places = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(_look_at(environment, places) for environment in environments))


async def _look_at(environment: Environment, places: asyncio.Semaphore) -> str | WorkerRefused:
    async with places:
        try:
            worker = await Worker.start(verifiers_program(environment), LIMIT)
        except WorkerRefused as refused:
            return refused
        await worker.close()
    about = worker.about
    return (
        f"environment {environment.name}: {environment.id} {about['version'] or '(no version)'}, "
        f"{about['api'].removeprefix('api_')} on verifiers {about['verifiers']}, {about['tasks']} tasks"
    )
