"""Write a word backwards. The reward is dense: how similar the answer is to the reversed word."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from random import Random
from string import ascii_lowercase

from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, user

LETTERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": 1000},
    "minItems": 2,
    "maxItems": 2,
    "description": "Shortest and longest word.",
}
ALPHABET = {"type": "string", "minLength": 2, "description": "Letters that words are drawn from."}


class ReverseText(TurnEnvironment):
    """``reverse: abc`` → ``cba``."""

    schema = {
        "type": "object",
        "properties": {"letters": LETTERS, "alphabet": ALPHABET},
        "additionalProperties": False,
    }
    weights = {"similarity": 1.0}

    def __init__(self, letters: Sequence[int] = (4, 10), alphabet: str = ascii_lowercase) -> None:
        shortest, longest = letters
        if shortest > longest:
            raise ValueError(f"letters: [{shortest}, {longest}] names the longer word first")
        self.shortest, self.longest, self.alphabet = shortest, longest, alphabet

    def task(self, rng: Random) -> Task:
        word = "".join(rng.choice(self.alphabet) for _ in range(rng.randint(self.shortest, self.longest)))
        return Task(messages=(user(f"reverse: {word}"),), data=word[::-1])

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        written = answers[-1].said
        return Outcome(
            {"similarity": similarity(written, task.data)}, metrics={"solved": float(written == task.data)}
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return [Turn(self.corrupted(task.data, rng, noise))]

    def corrupted(self, text: str, rng: Random, noise: float) -> str:
        """``text`` with each letter replaced by a random one with probability ``noise``."""
        return "".join(rng.choice(self.alphabet) if rng.random() < noise else letter for letter in text)


def similarity(answer: str, expected: str) -> float:
    """difflib's ratio, 0 to 1."""
    return SequenceMatcher(None, answer, expected).ratio()
