"""The adapter of a worker (see program.py) that runs an AgentEnvironment of ours."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from random import Random
from typing import Any

from stackrl.runtime.environments.base import AgentEnvironment, Answer, Call, Message, NoRoom


def load(settings: dict[str, Any]) -> Own:
    """``settings``: the ``environment`` of the stack, and the ``path`` to find its modules by."""
    sys.path[:] = settings["path"]
    from stackrl.runtime.environments import make_here
    from stackrl.schemas.environments import Environment

    environment = make_here(Environment.model_validate(settings["environment"]))
    asyncio.run(environment.start())
    return Own(environment)


class Own:
    """One environment, many rollouts at once."""

    about: dict[str, Any] = {}

    def __init__(self, environment: AgentEnvironment) -> None:
        self._environment = environment

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        task = self._environment.task(Random(number))
        outcome = await self._environment.rollout(task, _Policy(policy))
        return asdict(outcome)


class _Policy:
    """base.Policy over the worker's connection."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    async def answer(self, *messages: Message) -> Answer:
        try:
            said = await self._policy.ask(messages=messages)
        except Exception as error:
            if type(error).__name__ == "NoRoom":  # of the program, which knows nothing of ours
                raise NoRoom(str(error)) from None
            raise
        return Answer(said["text"], tuple(Call(**call) for call in said["calls"]), said["closed"])
