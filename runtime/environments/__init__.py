"""The environments that a stack can name by ``type``."""

from __future__ import annotations

from typing import Any

from stackrl.runtime.environments.base import Environment
from stackrl.runtime.environments.reverse_text import ReverseText
from stackrl.runtime.environments.reverse_text_tries import ReverseTextTries
from stackrl.runtime.environments.swap_words import SwapWords
from stackrl.schemas import environments as stack

RUNNABLE: dict[str, type[Environment]] = {
    "reverse_text": ReverseText,
    "reverse_text_tries": ReverseTextTries,
    "swap_words": SwapWords,
}

DECLARED: dict[str, dict[str, Any]] = {
    "wordle": {
        "type": "object",
        "properties": {
            "guesses": {"type": "integer", "minimum": 1, "description": "Guesses that the model may make."},
        },
        "additionalProperties": False,
    },
    "math": {
        "type": "object",
        "properties": {
            "dataset": {"type": "string", "minLength": 1, "description": "Name of the set of problems."},
        },
        "required": ["dataset"],
        "additionalProperties": False,
    },
    "swe": {
        "type": "object",
        "properties": {
            "dataset": {"type": "string", "minLength": 1, "description": "Name of the set of tasks."},
            "sandbox": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["docker", "bwrap"], "description": "What isolates the code."}
                },
                "required": ["type"],
                "additionalProperties": False,
            },
        },
        "required": ["dataset"],
        "additionalProperties": False,
    },
}
"""Types that the stack's language knows and this version cannot run: the schema of their arguments."""


class EnvironmentRefused(ValueError):
    """An environment that cannot be made. The text names it and says why."""


def schema_of(type: str) -> dict[str, Any]:
    """JSON Schema of the ``args`` of an environment type. Raises KeyError for an unknown one."""
    return RUNNABLE[type].schema if type in RUNNABLE else DECLARED[type]


def make(environment: stack.Environment) -> Environment:
    """The environment that a stack describes. Raises EnvironmentRefused where that cannot be."""
    kind = RUNNABLE.get(environment.type)
    if kind is None:
        raise EnvironmentRefused(
            f"environment {environment.name!r}: type {environment.type!r} cannot run in this version; "
            f"use one of {', '.join(RUNNABLE)}"
        )
    try:
        made = kind(**environment.args)
    except (TypeError, ValueError) as error:
        raise EnvironmentRefused(f"environment {environment.name!r}: {error}") from error
    made.weights = {**kind.weights, **environment.rewards}
    return made
