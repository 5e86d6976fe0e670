"""The adapter of a worker (see program.py) that runs an AgentEnvironment of ours."""

from __future__ import annotations

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

    return Own(make_here(Environment.model_validate(settings["environment"])))


class Own:
    """One environment, many rollouts at once."""

    about: dict[str, Any] = {}

    def __init__(self, environment: AgentEnvironment) -> None:
        self._environment = environment

    async def start(self) -> None:
        """In the event loop of the rollouts: what it makes there belongs to that loop."""
        await self._environment.start()

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        task = self._environment.task(Random(number))
        try:
            outcome = await self._environment.rollout(task, _Policy(policy))
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the others' rollouts too
            raise RuntimeError(f"the environment raised {error!r}") from error
        return asdict(outcome)


class _Policy:
    """base.Policy over the worker's connection."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.seconds = policy.seconds

    async def answer(self, *messages: Message) -> Answer:
        try:
            said = await self._policy.ask(messages=messages)
        except Exception as error:
            if type(error).__name__ == "NoRoom":  # of the program, which knows nothing of ours
                raise NoRoom(str(error)) from None
            raise
        return Answer(
            said["text"], tuple(Call(**call) for call in said["calls"]), said["closed"], said["thinking"]
        )
