"""Write a word backwards, with several tries: the environment answers a wrong one with "no, try again"."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar

from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, user
from stackrl.runtime.environments.reverse_text import ReverseText, similarity

NO = user("no, try again")
EARLY_MISTAKES = 0.4
"""Probability that an early try of a clean demonstration is a mistake, so that there are tries to follow."""
MISTAKEN_LETTERS = 0.75
"""Probability that a letter of such a mistake is replaced."""


class ReverseTextTries(ReverseText):
    """The reward of the last try, made smaller by ``penalty`` for each try before it."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            **ReverseText.schema["properties"],
            "tries": {"type": "integer", "minimum": 1, "description": "Answers that the model may give."},
            "penalty": {
                "type": "number",
                "minimum": 0,
                "description": "Share of the reward lost per earlier try.",
            },
        },
        "additionalProperties": False,
    }

    def __init__(
        self,
        letters: Sequence[int] = (4, 10),
        alphabet: str = ascii_lowercase,
        tries: int = 3,
        penalty: float = 0.1,
    ) -> None:
        super().__init__(letters, alphabet)
        if penalty * (tries - 1) > 1:
            raise ValueError(f"penalty: {penalty} makes the reward of the last of {tries} tries negative")
        self.tries, self.penalty = tries, penalty

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        before = len(answers) - 1
        written = answers[-1].said
        solved = written == task.data
        done = solved or len(answers) == self.tries
        return Outcome(
            {"similarity": similarity(written, task.data) * (1 - self.penalty * before)},
            done=done,
            messages=() if done else (NO,),
            metrics={"solved": float(solved), "tries": float(len(answers))},
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """Clean (``noise`` 0): some early tries are mistakes, which are not learnt. Noisy: all is learnt."""
        turns: list[Turn] = []
        for last in [False] * (self.tries - 1) + [True]:
            if noise:
                answer = self.corrupted(task.data, rng, noise)
            elif not last and rng.random() < EARLY_MISTAKES:
                answer = self.corrupted(task.data, rng, MISTAKEN_LETTERS)
            else:
                answer = task.data
            right = answer == task.data
            turns.append(Turn(answer, trained=right or noise > 0, messages=() if right or last else (NO,)))
            if right:
                break
        return turns
