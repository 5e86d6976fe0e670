"""Swap two words, shown by two examples: a task that a small pretrained model learns in a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, assistant, user
from stackrl.runtime.environments.reverse_text import similarity

WORDS = """
    cat dog sun sky red blue tree fish milk book hand ring
    lamp rain snow wind bird ship star moon road hill gold king
"""
EXAMPLES = (user("hat door"), assistant("door hat"), user("egg lake"), assistant("lake egg"))


class SwapWords(TurnEnvironment):
    """``cat dog`` → ``dog cat``. Spaces around the answer and its case do not count."""

    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    weights = {"similarity": 1.0}

    def task(self, rng: Random) -> Task:
        first, second = rng.sample(WORDS.split(), 2)
        return Task(messages=(*EXAMPLES, user(f"{first} {second}")), data=f"{second} {first}")

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        answer = answers[-1].said.strip().lower()
        return Outcome(
            {"similarity": similarity(answer, task.data)}, metrics={"solved": float(answer == task.data)}
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        words = (rng.choice(WORDS.split()) if rng.random() < noise else word for word in task.data.split())
        return [Turn(" ".join(words))]
