"""What an answer says: the part behind the thoughts, the number in it, and how near that is to another."""

from __future__ import annotations

import re
from random import Random

from stackrl.runtime.environments.reverse_text import similarity

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def said(text: str) -> str:
    """``text`` without the thoughts that it begins with, as reasoning models mark them."""
    return text.rpartition("</think>")[2]


def last_number(text: str) -> int | float | None:
    """The last number that ``text`` has, commas between its digits left out."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    digits = found[-1].replace(",", "")
    return float(digits) if "." in digits else int(digits)


def digits_alike(number: int | float | None, expected: int) -> float:
    """How much of ``expected`` is written right, digit by digit, 0 to 1: a reward on the way to 1."""
    return 0.0 if number is None else similarity(str(number), str(expected))


def with_other_digits(text: str, rng: Random, noise: float) -> str:
    """``text`` with each digit replaced by a random one with probability ``noise``."""
    return "".join(
        rng.choice("0123456789") if letter.isdigit() and rng.random() < noise else letter for letter in text
    )
