"""Problems of mathematics from a data set. Answers are compared as mathematics: 1/2 is 0.5."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.data.files import DataError, Row
from stackrl.runtime.environments import questions
from stackrl.runtime.environments.answers import with_other_digits
from stackrl.runtime.environments.base import Answer, Outcome, Task, Turn, TurnEnvironment, user
from stackrl.runtime.environments.limited import called
from stackrl.runtime.environments.math_comparison import LIMIT, START_LIMIT, Comparison

MATH_VERIFY = "math-verify[antlr4_13_2]>=0.8,<1"
"""What compares, as in pyproject.toml."""
INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."


@dataclass(frozen=True)
class Known:
    """A data set of the Hub whose columns are known."""

    dataset: str
    subset: str = "default"
    split: str = "train"
    question: str = "problem"
    answer: str = "answer"


KNOWN = {
    "gsm8k": Known("openai/gsm8k", subset="main", question="question"),
    "math-500": Known("HuggingFaceH4/MATH-500", split="test"),
    "deepscaler": Known("agentica-org/DeepScaleR-Preview-Dataset"),
    "aime-2024": Known("HuggingFaceH4/aime_2024"),
    "aime-2025": Known("MathArena/aime_2025"),
}
"""By the short name that `dataset` may have."""


class Math(TurnEnvironment):
    """One answer; what stands in its last ``\\boxed{}`` counts."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "dataset": {
                **questions.DATASET,
                "description": f"{', '.join(f'`{name}`' for name in KNOWN)}, or as of the environment "
                "`dataset`: files, or OWNER/NAME on the Hugging Face Hub.",
            },
            **questions.PROPERTIES,
            "question": {"type": "string", "minLength": 1, "description": "Column with the problem."},
            "answer": {
                "type": "string",
                "minLength": 1,
                "description": "Column with the right answer; of a text that ends with `#### 42`, the 42.",
            },
            "instruction": {"type": "string", "description": "What follows each problem in the prompt."},
        },
        "required": ["dataset"],
        "additionalProperties": False,
    }
    weights = {"right": 1.0}

    def __init__(
        self,
        dataset: str,
        subset: str | None = None,
        split: str | None = None,
        limit: int | None = None,
        question: str | None = None,
        answer: str | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        if find_spec("math_verify") is None:
            raise ValueError(
                "math-verify, which compares answers, is not installed; type "
                f"`{sys.executable} -m pip install '{MATH_VERIFY}'`"
            )
        known = KNOWN.get(dataset) or Known(dataset)
        self._question, self._answer = question or known.question, answer or known.answer
        self._instruction = instruction
        self._rows = questions.rows_of(known.dataset, subset or known.subset, split or known.split, limit)
        for row in self._rows:
            self._task(row)

    def task(self, rng: Random) -> Task:
        return self._task(rng.choice(self._rows))

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        """An answer without a box is wrong, and so is one that cannot be compared."""
        written = last_boxed(answers[-1].said)
        equal: bool | None = False
        if written is not None:
            limit = START_LIMIT + 10 * LIMIT  # the comparison has its own; this one is for the queue before
            equal = await called(_comparison().equal, task.data, written, limit=limit, name="math-verify")
        right = float(equal is True)
        metrics = {"solved": right, "boxed": float(written is not None), "incomparable": float(equal is None)}
        return Outcome({"right": right}, metrics=metrics)

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return [Turn(with_other_digits(f"\\boxed{{{task.data}}}", rng, noise))]

    def _task(self, row: Row) -> Task:
        """Raises DataError where a column is missing."""
        for column, key in ((self._question, "question"), (self._answer, "answer")):
            if row.values.get(column) in (None, ""):
                raise DataError(
                    f"{row.place}: the row has no {column!r}; its columns are "
                    f"{', '.join(sorted(row.values))}: name the right one as `{key}`"
                )
        asked = f"{row.values[self._question]}\n{self._instruction}".strip()
        gold = str(row.values[self._answer]).rpartition("####")[2].strip()
        return Task((user(asked),), last_boxed(gold) or gold)


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{}`` of ``text``; None where there is none that ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position].strip()
    return None


@cache
def _comparison() -> Comparison:
    """One pool for all environments of a process."""
    return Comparison()
