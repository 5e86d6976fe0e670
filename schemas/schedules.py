"""`optimizer.schedule:` the course of the learning rate from the end of warmup to the end of a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from stackrl.schemas.base import Model, variant

Share = Annotated[float, Field(ge=0, le=1)]


class ConstantSchedule(Model):
    """The rate stays."""

    type: Literal["constant"] = "constant"
    """Which course."""


class LinearSchedule(Model):
    """The rate falls evenly."""

    type: Literal["linear"]
    """Which course."""
    final_rate: Share = 0.0
    """Share of `learning_rate` that is left at the end of the stage."""


class CosineSchedule(Model):
    """The rate falls along half a cosine (arXiv 1608.03983) to a minimum."""

    type: Literal["cosine"]
    """Which course."""
    final_rate: Share = 0.1
    """Share of `learning_rate` that is left at the end of the stage."""


class WarmupStableDecaySchedule(Model):
    """The rate stays, then falls evenly over the last steps of the stage (arXiv 2404.06395, 2405.18392)."""

    type: Literal["warmup-stable-decay"]
    """Which course."""
    decay_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the stage's steps over which the rate falls; at least one step."""
    final_rate: Share = 0.0
    """Share of `learning_rate` that is left at the end of the stage."""


SCHEDULES = (ConstantSchedule, LinearSchedule, CosineSchedule, WarmupStableDecaySchedule)
Schedule = Annotated[
    Annotated[ConstantSchedule, Tag("constant")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[CosineSchedule, Tag("cosine")]
    | Annotated[WarmupStableDecaySchedule, Tag("warmup-stable-decay")],
    variant("type", default="constant"),
]


def decay_steps(decay_share: float, total_steps: int) -> int:
    """Steps of the decay at the end of a stage of ``total_steps``."""
    return max(1, round(decay_share * total_steps))
