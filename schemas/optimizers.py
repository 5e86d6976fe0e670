"""`optimizer:` how a gradient becomes a step, and how the rate changes over a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.base import Model

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Model):
    """AdamW (arXiv 1711.05101) with gradient clipping, linear warmup and decay."""

    type: Literal["adamw"] = "adamw"
    """Which optimizer."""
    learning_rate: float = Field(default=1.0e-6, ge=0)
    """Rate after warmup."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.99), strict=False)
    """How much of the running means of the gradient and of its square is kept at each step."""
    epsilon: float = Field(default=1.0e-8, gt=0)
    """Added to the root of the second mean."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; norms and biases are left out."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate grows linearly to `learning_rate`."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate from the end of warmup to the end of the stage."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` that is left at the end of the decay."""
