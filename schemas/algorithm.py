"""`algorithm:` what is learnt from a reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from stackrl.schemas.base import Model, variant

Normalize = Literal["token", "sequence", "constant"]


class GrpoAdvantage(Model):
    """Reward minus the mean of its group (arXiv 2402.03300; without the deviation: 2503.20783)."""

    type: Literal["grpo"] = "grpo"
    """Which advantage."""
    divide_by_deviation: bool = False
    """Divide by the group's standard deviation as well."""


class _Loss(Model):
    normalize: Normalize = "token"
    """How the loss is averaged.
    `token`: mean over all trained tokens of the step; `sequence`: mean over sequences of their token means;
    `constant`: sum over tokens divided by sequences × `sampling.max_tokens`. All denominators are global."""


class AipoLoss(_Loss):
    """−sg(min(π/μ, ratio_cap)) · A · log π  (arXiv 2505.24034)."""

    type: Literal["aipo"] = "aipo"
    """Which loss."""
    ratio_cap: float = Field(default=5.0, ge=1)
    """Cap of the importance ratio between trainer and engine."""


class GrpoLoss(_Loss):
    """−min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) with r = π/μ  (arXiv 1707.06347, 2402.03300)."""

    type: Literal["grpo"]
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio counts."""


Loss = Annotated[
    Annotated[AipoLoss, Tag("aipo")] | Annotated[GrpoLoss, Tag("grpo")],
    variant("type", default="aipo"),
]
Advantage = GrpoAdvantage


class Algorithm(Model):
    """Groups, batches, advantages and loss."""

    advantage: Advantage = GrpoAdvantage()
    """How much better a rollout is than the others of its group."""
    loss: Loss = AipoLoss()
    """What is minimised. A stage that changes it gives the whole loss."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of one prompt."""
    batch_size: int = Field(default=128, ge=2)
    """Rollouts in one trainer step; a multiple of group_size."""
    max_staleness: int = Field(default=1, ge=0)
    """Trainer steps between the oldest token of a sample and the step that trains it; 0: generate and train
    in turn."""
    no_signal: Literal["keep", "refill"] = "keep"
    """Groups whose rewards are all equal: keep them in the batch, or refill it with other groups."""
