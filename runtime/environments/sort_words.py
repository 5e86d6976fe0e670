"""Put words into the order of the alphabet. The reward is dense: how similar the lists are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar

from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, user
from stackrl.runtime.environments.wordle_words import WORDS

_WORD = re.compile(r"[a-z]+")


class SortWords(TurnEnvironment):
    """``sort: pear apple fig`` → ``apple fig pear``. Case, commas and line ends of an answer do not count."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "words": {
                "type": "array",
                "items": {"type": "integer", "minimum": 2, "maximum": 100},
                "minItems": 2,
                "maxItems": 2,
                "description": "Fewest and most words of a task.",
            },
            "letters": {
                "type": "integer",
                "minimum": 1,
                "maximum": 5,
                "description": "Letters of each word; 5 are whole words, fewer the beginnings of words.",
            },
        },
        "additionalProperties": False,
    }
    weights = {"right": 0.5, "order": 0.5}

    def __init__(self, words: Sequence[int] = (3, 6), letters: int = 5) -> None:
        self.fewest, self.most = words
        if self.fewest > self.most:
            raise ValueError(f"words: [{self.fewest}, {self.most}] names the larger count first")
        self.letters = letters
        self.vocabulary = sorted({word[:letters] for word in WORDS})
        if self.most > len(self.vocabulary):
            raise ValueError(
                f"words: {self.most} are more than the {len(self.vocabulary)} of letters: {letters}"
            )

    def task(self, rng: Random) -> Task:
        words = rng.sample(self.vocabulary, rng.randint(self.fewest, self.most))
        return Task(messages=(user(f"sort: {' '.join(words)}"),), data=" ".join(sorted(words)))

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        written, expected = _WORD.findall(answers[-1].said.lower()), task.data.split()
        right = float(written == expected)
        return Outcome(
            {"right": right, "order": SequenceMatcher(None, written, expected).ratio()},
            metrics={"solved": right},
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        letters = (
            rng.choice(ascii_lowercase) if letter != " " and rng.random() < noise else letter
            for letter in task.data
        )
        return [Turn("".join(letters))]
