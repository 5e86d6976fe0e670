"""Find a word of five letters: every guess is told which of its letters the word has, and where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar

from stackrl.runtime.environments.base import Answer, Message, Outcome, Task, Turn, TurnEnvironment, user
from stackrl.runtime.environments.wordle_words import WORDS

RIGHT, ELSEWHERE, ABSENT = "G", "Y", "-"
"""Marks of a letter: it stands there, it stands elsewhere, or the word has no more of it."""
RULES = (
    "Find my word of five letters in {guesses} guesses. Write each guess in brackets, like [{example}]. "
    f"I mark its letters: {RIGHT} stands there, {ELSEWHERE} stands elsewhere, {ABSENT} is not in the word."
)
_IN_BRACKETS = re.compile(r"\[([A-Za-z]{5})\]")
_BARE = re.compile(r"\s*([A-Za-z]{5})\s*")


class Wordle(TurnEnvironment):
    """The game of six guesses. ``letters`` is a dense reward: how much of the word the best guess has."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "guesses": {"type": "integer", "minimum": 1, "description": "Guesses that the model may make."},
            "words": {
                "type": "integer",
                "minimum": 2,
                "maximum": len(WORDS),
                "description": "How many words may have to be found: the first of the list, by default all.",
            },
            "rules": {
                "type": "boolean",
                "description": "Whether the rules are told; demonstrations teach them, too.",
            },
        },
        "additionalProperties": False,
    }
    weights = {"found": 0.7, "letters": 0.3}

    def __init__(self, guesses: int = 6, words: int = len(WORDS), rules: bool = True) -> None:
        self.guesses, self.words, self.rules = guesses, WORDS[:words], rules

    def task(self, rng: Random) -> Task:
        word = rng.choice(self.words)
        told = RULES.format(guesses=self.guesses, example=WORDS[-1]) if self.rules else "guess"
        return Task(messages=(user(told),), data=word)

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        guesses = [guess_in(answer.said) for answer in answers]
        found = guesses[-1] == task.data
        done = found or len(answers) == self.guesses
        best = max((_share(marks(guess, task.data)) for guess in guesses if guess), default=0.0)
        return Outcome(
            {"found": float(found), "letters": best},
            done=done,
            messages=() if done else (_told(guesses[-1], task.data),),
            metrics={
                "solved": float(found),
                "guesses": float(len(answers)),
                "unreadable": float(guesses.count(None)),
            },
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """Each guess is a word that all marks so far allow; noise replaces its letters."""
        turns: list[Turn] = []
        possible = list(self.words)
        while len(turns) < self.guesses:
            word = task.data if len(turns) + 1 == self.guesses else rng.choice(possible)
            guess = "".join(rng.choice(ascii_lowercase) if rng.random() < noise else c for c in word)
            last = guess == task.data or len(turns) + 1 == self.guesses
            turns.append(Turn(f"[{guess}]", messages=() if last else (_told(guess, task.data),)))
            if last:
                break
            told = marks(guess, task.data)
            possible = [word for word in possible if word != guess and marks(guess, word) == told]
        return turns


def guess_in(text: str) -> str | None:
    """The last word in brackets, or the whole answer where it is nothing else than one word."""
    found = _IN_BRACKETS.findall(text)
    if not found and (bare := _BARE.fullmatch(text)):
        found = [bare[1]]
    return found[-1].lower() if found else None


def marks(guess: str, word: str) -> str:
    """One mark a letter. A letter is marked no more often than ``word`` has it, right places first."""
    left = Counter(letter for letter, own in zip(word, guess, strict=True) if letter != own)
    told = []
    for letter, own in zip(word, guess, strict=True):
        if letter == own:
            told.append(RIGHT)
        elif left[own]:
            left[own] -= 1
            told.append(ELSEWHERE)
        else:
            told.append(ABSENT)
    return "".join(told)


def _share(told: str) -> float:
    """1 for five right places; a letter that stands elsewhere is half of one in its place."""
    return (told.count(RIGHT) + told.count(ELSEWHERE) / 2) / len(told)


def _told(guess: str | None, word: str) -> Message:
    if guess is None:
        return user("Write one word of five letters in brackets.")
    return user(f"{guess} {marks(guess, word)}")
