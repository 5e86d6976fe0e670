"""`trainer.lora:` train small adapters beside frozen weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stackrl.schemas.base import Model


class Lora(Model):
    """LoRA (arXiv 2106.09685): an adapted matrix W acts as W + alpha / rank · BA; only A and B are trained.
    Engines and the final model get the sum, and the adapters alone are left beside the final model."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B. Experts are fastest with a multiple of 8."""
    alpha: int = Field(default=32, ge=1)
    """What the adapters count, times the rank."""
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """Which linear layers are adapted, by the last part of their names, such as `q_proj`, wherever the model
    has one; by default all of attention, MLPs and experts."""
