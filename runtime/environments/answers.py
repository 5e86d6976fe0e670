"""What an answer says: the number in it, and how near that is to another."""

from __future__ import annotations

import re
from random import Random

from stackrl.runtime.environments.reverse_text import similarity

MOST_DIGITS = 30
"""Of a number in front of its point: no task has a larger one, and Python reads none of thousands."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> int | float | None:
    """The last number that ``text`` has, commas between its digits left out; None where it is too large."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    whole, point, part = found[-1].replace(",", "").partition(".")
    if len(whole.lstrip("-")) > MOST_DIGITS:
        return None
    return float(f"{whole}.{part}") if point else int(whole)


def digits_alike(number: int | float | None, expected: int) -> float:
    """How much of ``expected`` is written right, digit by digit, 0 to 1: a reward on the way to 1."""
    return 0.0 if number is None else similarity(str(number), str(expected))


def with_other_digits(text: str, rng: Random, noise: float) -> str:
    """``text`` with each digit replaced by a random one with probability ``noise``."""
    return "".join(
        rng.choice("0123456789") if letter.isdigit() and rng.random() < noise else letter for letter in text
    )
