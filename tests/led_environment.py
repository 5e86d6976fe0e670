"""An environment that leads its rollouts itself, for runs of the orchestrator with a fake engine."""

from __future__ import annotations

import asyncio
from random import Random
from typing import ClassVar

from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Policy, Task, user


class Led(AgentEnvironment):
    """The word that reverse_text asks for, with `turns` answers; it is told each time to try again."""

    weights: ClassVar = {"right": 0.9, "closed": 0.1}

    def __init__(self, turns: int = 2, pause: float = 0.0) -> None:
        """``pause``: seconds between two answers."""
        self._turns, self._pause = turns, pause

    def task(self, rng: Random) -> Task:
        word = "".join(rng.choice("abcdefgh") for _ in range(4))
        return Task((user(f"reverse: {word}"),), word)

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        answer = await policy.answer()
        for _ in range(self._turns - 1):
            await asyncio.sleep(self._pause)
            answer = await policy.answer(user(f"reverse: {task.data}"))
        pairs = zip(answer.text, task.data[::-1], strict=False)
        right = sum(said == letter for said, letter in pairs) / len(task.data)
        return Outcome(
            rewards={"right": right, "closed": float(answer.closed)}, metrics={"solved": right == 1}
        )
