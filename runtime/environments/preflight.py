"""Whether this machine can make the environments that a stack names, before anything starts.

Code and data of the user are looked at in processes of their own. What the built-in environments take is
checked by rules (schemas/rules_of_arguments.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

from stackrl.runtime.environments.users_own import needs_a_look
from stackrl.runtime.environments.verifiers.preflight import Looked
from stackrl.runtime.environments.workers import trial
from stackrl.runtime.environments.workers.parties import Program, WorkerRefused
from stackrl.runtime.environments.workers.worker import Worker
from stackrl.schemas.environments import Environment
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import Path as Place
from stackrl.schemas.problems import Problem
from stackrl.schemas.rules_of_workers import environments_of
from stackrl.schemas.stack import Stack

LIMIT = 180.0
"""Seconds for one environment: it may have large files to read."""
AT_ONCE = 2
"""Environments that are looked at side by side."""


def look(loaded: LoadedStack, *, whole: bool) -> Looked:
    """Make each environment that has code or data of the user, in a process that ends then.

    ``whole``: do all that a run does before its first rollout: make every environment that needs more than
    the standard library, fetch data sets, try sandboxes and ask judges.
    """
    found = list(_looked_at(loaded.stack, whole))
    looked = Looked([], [], [])
    results = asyncio.run(_try_all([environment for _, environment in found], whole)) if found else []
    for (path, _), refused in zip(found, results, strict=True):
        if refused is not None:
            place = (*path, "args") if refused.key in ("args", trial.ABSENT) else path
            problem = Problem(place, refused.what, refused.mend)
            (looked.errors if refused.key == "args" else looked.absent).extend(loaded.locate([problem]))
    return looked


def program(environment: Environment, whole: bool) -> Program:
    """What a worker that only tries ``environment`` runs."""
    settings = {
        "environment": environment.model_dump(mode="json", exclude_unset=True),
        "path": sys.path,
        "whole": whole,
    }
    return Program(environment.name, Path(trial.__file__), settings, sys.executable)


def _looked_at(stack: Stack, whole: bool) -> Iterator[tuple[Place, Environment]]:
    """Each environment once, where it is asked for in the same way."""
    seen = set()
    for path, environment in environments_of(stack):
        same = str([environment.type, environment.args, environment.rewards])
        if same not in seen and needs_a_look(environment, whole):
            seen.add(same)
            yield path, environment


async def _try_all(environments: list[Environment], whole: bool) -> list[WorkerRefused | None]:
    places = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(_try(environment, whole, places) for environment in environments))


async def _try(environment: Environment, whole: bool, places: asyncio.Semaphore) -> WorkerRefused | None:
    async with places:
        try:
            worker = await Worker.start(program(environment, whole), LIMIT)
        except WorkerRefused as refused:
            return refused
        await worker.close()
    return None
