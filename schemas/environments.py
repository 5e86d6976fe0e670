"""`environments:` what is learnt. The arguments of each type are checked against the schema it declares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from stackrl.schemas.base import Model, Name

EnvironmentType = Literal["reverse_text", "reverse_text_tries", "swap_words", "wordle", "math", "swe"]


class Environment(Model):
    """One environment of the mix."""

    name: Name
    """Unique; metrics carry it."""
    type: EnvironmentType
    """Which environment; stackrl/runtime/environments/ has one file for each."""
    args: dict[str, JsonValue] = {}
    """The environment's own arguments."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other environments."""
    rewards: dict[str, float] = {}
    """Weights of the environment's rewards by name, where they are not its own."""


class Evaluate(Model):
    """Held-out environments, run on the current version."""

    every: int = Field(ge=1)
    """Trainer steps between evaluations."""
    environments: list[Environment] = Field(min_length=1)
    """What is evaluated."""
