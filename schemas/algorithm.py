"""`algorithm:` what is learnt from a reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stackrl.schemas.advantages import Advantage, Curriculum, GrpoAdvantage, Shaping
from stackrl.schemas.base import Model, untouched
from stackrl.schemas.losses import AipoLoss, Distillation, Loss
from stackrl.schemas.teachers import Reference


class Algorithm(Model):
    """Groups, batches, advantages and loss."""

    advantage: Advantage = untouched(GrpoAdvantage)
    """How much better a rollout is than others. A stage that changes it gives the whole advantage."""
    shaping: Shaping | None = None
    """What rewards are changed by before rollouts are compared. A stage that changes it gives the whole
    shaping, or null for none."""
    reference: Reference | None = None
    """A model that is asked about what was sampled, or samples itself: a fixed reference, or a teacher. A
    stage that changes it gives the whole reference, or null for none."""
    curriculum: Curriculum | None = None
    """Draw environments more often that are neither solved nor hopeless. A stage that changes it gives the
    whole curriculum, or null for none."""
    loss: Loss = untouched(AipoLoss)
    """What is minimised. A stage that changes it gives the whole loss."""
    distillation: Distillation = untouched(Distillation)
    """Loss of what environments of `component: ref_kl` sampled. A stage that changes it gives the whole
    section."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one prompt; one where nothing is compared within a group."""
    batch_size: int = Field(default=128, ge=2)
    """Rollouts in one trainer step; a multiple of group_size."""
    max_staleness: int = Field(default=1, ge=0)
    """Trainer steps between the oldest token of a sample and the step that trains it; 0: generate and train
    in turn."""
    no_signal: Literal["keep", "refill"] = "keep"
    """Groups whose rewards are all equal: keep them in the batch, or refill it with other groups."""
