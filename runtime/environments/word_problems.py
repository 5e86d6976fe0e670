"""Small stories with numbers in them, made as they are needed: no data set, no download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.answers import digits_alike, last_number, with_other_digits
from stackrl.runtime.environments.arithmetic import LARGEST
from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, user

NAMES = ("Ada", "Ben", "Carla", "Deniz", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "stamps", "marbles", "coins", "cards", "shells", "books", "pens", "stickers", "nuts")

Step = tuple[str, str, int]
"""A sentence, the sum that it asks for, and how many there are after it."""


def _gains(rng: Random, name: str, things: str, held: int, largest: int) -> Step:
    more = rng.randint(1, largest)
    sentence = rng.choice(
        (f"{name} finds {more} more.", f"{name} buys {more} {things}.", f"A friend gives {name} {more}.")
    )
    return sentence, f"{held}+{more}={held + more}", held + more


def _loses(rng: Random, name: str, things: str, held: int, largest: int) -> Step:
    if not held:
        return _gains(rng, name, things, held, largest)
    less = rng.randint(1, min(held, largest))
    sentence = rng.choice((f"{name} gives {less} away.", f"{name} loses {less} of the {things}."))
    return sentence, f"{held}-{less}={held - less}", held - less


def _multiplies(rng: Random, name: str, things: str, held: int, largest: int) -> Step:
    times, word = rng.choice(((2, "twice"), (3, "three times"), (4, "four times")))
    return f"The next day {name} has {word} as many.", f"{held}*{times}={held * times}", held * times


def _shares(rng: Random, name: str, things: str, held: int, largest: int) -> Step:
    boxes = [number for number in (2, 3, 4, 5) if held and held % number == 0]
    if not boxes:
        return _gains(rng, name, things, held, largest)
    count = rng.choice(boxes)
    share = held // count
    sentence = f"{name} splits them evenly among {count} boxes and keeps one box."
    return sentence, f"{held}/{count}={share}", share


STEPS: tuple[Callable[[Random, str, str, int, int], Step], ...] = (_gains, _loses, _multiplies, _shares)


class WordProblems(TurnEnvironment):
    """How many are there in the end? Of an answer the last number counts, so that a model may reason."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "largest": LARGEST,
            "steps": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 12},
                "minItems": 2,
                "maxItems": 2,
                "description": "Fewest and most things that happen in a story.",
            },
        },
        "additionalProperties": False,
    }
    weights = {"right": 0.5, "digits": 0.5}

    def __init__(self, largest: int = 20, steps: Sequence[int] = (1, 3)) -> None:
        self.fewest, self.most = steps
        if self.fewest > self.most:
            raise ValueError(f"steps: [{self.fewest}, {self.most}] names the larger count first")
        self.largest = largest

    def task(self, rng: Random) -> Task:
        name, things, held = rng.choice(NAMES), rng.choice(THINGS), rng.randint(1, self.largest)
        story, sums = [f"{name} has {held} {things}."], []
        for _ in range(rng.randint(self.fewest, self.most)):
            sentence, worked, held = rng.choice(STEPS)(rng, name, things, held, self.largest)
            story.append(sentence)
            sums.append(worked)
        story.append(f"How many {things} does {name} have now?")
        return Task(messages=(user(" ".join(story)),), data={"answer": held, "sums": sums})

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        written, expected = last_number(answers[-1].said), task.data["answer"]
        right = float(written == expected)
        return Outcome({"right": right, "digits": digits_alike(written, expected)}, metrics={"solved": right})

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """The sums one after the other, then the answer."""
        worked = "\n".join([*task.data["sums"], str(task.data["answer"])])
        return [Turn(with_other_digits(worked, rng, noise))]
