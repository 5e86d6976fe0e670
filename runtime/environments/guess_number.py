"""Find a number: every guess is told whether the number is higher or lower."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.answers import last_number
from stackrl.runtime.environments.base import Answer, Message, Outcome, Task, Turn, TurnEnvironment, user


class GuessNumber(TurnEnvironment):
    """A game of several turns. Halving what is left finds any number in log2(``largest``) + 1 guesses."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "largest": {
                "type": "integer",
                "minimum": 2,
                "maximum": 1_000_000,
                "description": "Largest number that may have to be found; the smallest is 1.",
            },
            "guesses": {"type": "integer", "minimum": 1, "description": "Guesses that the model may make."},
        },
        "additionalProperties": False,
    }
    weights = {"found": 0.7, "near": 0.3}

    def __init__(self, largest: int = 100, guesses: int = 7) -> None:
        self.largest, self.guesses = largest, guesses

    def task(self, rng: Random) -> Task:
        rules = f"Find my number from 1 to {self.largest} in {self.guesses} guesses."
        return Task(messages=(user(rules),), data=rng.randint(1, self.largest))

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        """``near``: how much of the range the best guess rules out on the way to the number, 0 to 1."""
        guesses = [last_number(answer.said) for answer in answers]
        found = guesses[-1] == task.data
        done = found or len(answers) == self.guesses
        distances = [abs(guess - task.data) for guess in guesses if guess is not None]
        near = max(0.0, 1 - min(distances, default=self.largest) / self.largest)
        return Outcome(
            {"found": float(found), "near": near},
            done=done,
            messages=() if done else (self._told(guesses[-1], task.data),),
            metrics={"solved": float(found), "guesses": float(len(answers))},
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """Halve what is left; noise replaces a guess by any number of the range."""
        turns: list[Turn] = []
        low, high = 1, self.largest
        while len(turns) < self.guesses:
            guess = rng.randint(1, self.largest) if rng.random() < noise else (low + high) // 2
            last = guess == task.data or len(turns) + 1 == self.guesses
            turns.append(Turn(str(guess), messages=() if last else (self._told(guess, task.data),)))
            if guess == task.data:
                break
            low, high = (max(low, guess + 1), high) if guess < task.data else (low, min(high, guess - 1))
        return turns

    def _told(self, guess: int | float | None, number: int) -> Message:
        if guess is None:
            return user(f"Say a number from 1 to {self.largest}.")
        return user("higher" if guess < number else "lower")
