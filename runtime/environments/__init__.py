"""The environments that a stack can name by ``type``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from stackrl.runtime.data.files import DataError
from stackrl.runtime.environments.base import AgentEnvironment, Environment
from stackrl.schemas import environments as stack
from stackrl.schemas.words import near


class _Registry(Mapping[str, type[Environment]]):
    """Type → class, whose module is imported when it is asked for: a stack names few of them."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, type: str) -> type[Environment]:
        module, _, name = self._places[type].rpartition(".")
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, type: object) -> bool:
        return type in self._places


RUNNABLE = _Registry(
    {
        "reverse_text": "reverse_text.ReverseText",
        "reverse_text_tries": "reverse_text_tries.ReverseTextTries",
        "swap_words": "swap_words.SwapWords",
        "sort_words": "sort_words.SortWords",
        "arithmetic": "arithmetic.Arithmetic",
        "word_problems": "word_problems.WordProblems",
        "guess_number": "guess_number.GuessNumber",
        "wordle": "wordle.Wordle",
        "tool_use": "tool_use.ToolUse",
        "math": "math.Math",
        "dataset": "dataset.Dataset",
        "python": "python.Python",
        "swe": "swe.Swe",
        "verifiers": "verifiers.Verifiers",
    }
)
"""Where the class of each type stands in this package."""


class EnvironmentRefused(ValueError):
    """An environment that cannot be made. The text names it and says why."""


def schema_of(type: str) -> dict[str, Any]:
    """JSON Schema of the ``args`` of an environment type. Raises KeyError for an unknown one."""
    return RUNNABLE[type].schema


def make(environment: stack.Environment) -> Environment:
    """The environment that a stack describes; one that leads its rollouts does so in worker processes.

    Raises EnvironmentRefused where that cannot be.
    """
    made = make_here(environment)
    if isinstance(made, AgentEnvironment):
        from stackrl.runtime.environments.workers import in_workers

        inner, made = made, in_workers(made, environment)
        made.weights, made.expected = inner.weights, inner.expected
    return made


def make_here(environment: stack.Environment) -> Environment:
    """As ``make``, with rollouts in this process."""
    kind = RUNNABLE[environment.type]
    try:
        made = kind.made(environment.args)
        known = list(made.weights or kind.reward_names(environment.args))
    except (Exception, SystemExit) as error:  # the constructor may be anybody's
        plain = str(error) and isinstance(error, TypeError | ValueError | DataError)
        why = error if plain else f"{type(error).__name__}: {error}".rstrip(": ")
        raise EnvironmentRefused(f"environment {environment.name!r}: {why}") from error
    for name in environment.rewards:
        if known and name not in known:
            what = f"rewards.{name}: there is no reward of this name"
            mend = near(name, known) or f"there is {', '.join(known)}"
            raise EnvironmentRefused(f"environment {environment.name!r}: {what}; {mend}")
    made.weights = {**made.weights, **environment.rewards}
    made.expected = () if known else tuple(environment.rewards)
    return made
