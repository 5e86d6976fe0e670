"""Sums, differences and products of whole numbers, without end and without a data set."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.answers import digits_alike, last_number, with_other_digits
from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, user

LARGEST = {
    "type": "integer",
    "minimum": 1,
    "maximum": 1_000_000,
    "description": "Largest number that a task names; the smallest is 0.",
}
TERMS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 2, "maximum": 12},
    "minItems": 2,
    "maxItems": 2,
    "description": "Fewest and most numbers in a task.",
}
OPERATIONS = {
    "type": "string",
    "pattern": r"^[+*-]+$",
    "description": "Signs that may stand between the numbers, out of +, - and *.",
}


class Arithmetic(TurnEnvironment):
    """``12+7-3=`` → ``16``. Of an answer the last number counts, so that a model may reason before it."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"largest": LARGEST, "terms": TERMS, "operations": OPERATIONS},
        "additionalProperties": False,
    }
    weights = {"right": 0.5, "digits": 0.5}

    def __init__(self, largest: int = 99, terms: Sequence[int] = (2, 2), operations: str = "+-") -> None:
        self.fewest, self.most = terms
        if self.fewest > self.most:
            raise ValueError(f"terms: [{self.fewest}, {self.most}] names the larger count first")
        self.largest, self.operations = largest, operations

    def task(self, rng: Random) -> Task:
        expression, value = drawn(rng, self.largest, rng.randint(self.fewest, self.most), self.operations)
        return Task(messages=(user(f"{expression}="),), data=value)

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        written = last_number(answers[-1].said)
        right = float(written == task.data)
        return Outcome(
            {"right": right, "digits": digits_alike(written, task.data)}, metrics={"solved": right}
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return [Turn(with_other_digits(str(task.data), rng, noise))]


def drawn(rng: Random, largest: int, terms: int, operations: str) -> tuple[str, int]:
    """An expression of ``terms`` numbers and its value; products before sums, as everywhere."""
    expression = str(rng.randint(0, largest))
    total, product = 0, int(expression)
    for _ in range(terms - 1):
        sign, number = rng.choice(operations), rng.randint(0, largest)
        expression += f"{sign}{number}"
        if sign == "*":
            product *= number
        else:
            total, product = total + product, number if sign == "+" else -number
    return expression, total + product
