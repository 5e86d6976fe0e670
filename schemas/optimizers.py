"""`optimizer:` how a gradient becomes a step, and how the rate changes over a stage.

A field that several optimizers have takes the same values in all of them: what a stage changes is checked
before it is known which optimizer the stack has (schemas/stages.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from stackrl.schemas.base import Model, untouched, variant
from stackrl.schemas.schedules import ConstantSchedule, Schedule

Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class _Optimizer(Model):
    type: str
    """Which optimizer."""
    learning_rate: NotNegative = 1.0e-6
    """Rate after warmup."""
    max_gradient_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate grows linearly to `learning_rate`."""
    schedule: Schedule = untouched(ConstantSchedule)
    """Course of the rate from the end of warmup to the end of the stage."""


class AdamW(_Optimizer):
    """AdamW (arXiv 1711.05101)."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.99), strict=False)
    """How much of the running means of the gradient and of its square is kept at each step."""
    epsilon: Positive = 1.0e-8
    """Added to the root of the second mean."""
    weight_decay: NotNegative = 0.0
    """Decoupled; norms and biases are left out."""


class Muon(_Optimizer):
    """Muon (arXiv 2502.16982) for the matrices between hidden states, stacked experts among them; AdamW for
    embeddings, head, norms and biases."""

    type: Literal["muon"]
    learning_rate: NotNegative = 1.0e-6
    """Rate after warmup, for both parts: Muon's steps are scaled to the size that AdamW's have."""
    momentum: Beta = 0.95
    """How much of the running mean of the gradient is kept at each step."""
    nesterov: bool = True
    """Step along the mean as it will be after one more such gradient."""
    iterations: int = Field(default=5, ge=1)
    """Newton–Schulz iterations of a step."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's part: how much of the running means of the gradient and of its square is kept at each step."""
    epsilon: Positive = 1.0e-8
    """AdamW's part: added to the root of the second mean."""
    weight_decay: NotNegative = 0.1
    """Decoupled, in both parts; norms and biases are left out."""


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"]
    learning_rate: NotNegative = 1.0e-3
    momentum: Beta = 0.9
    """How much of the running sum of the gradients is kept at each step; 0: plain descent."""
    nesterov: bool = False
    """Step along the sum as it will be after one more such gradient; needs momentum."""
    weight_decay: NotNegative = 0.0
    """Added to the gradient, times the weight (L2); norms and biases are left out."""


class SignSGD(_Optimizer):
    """Each weight moves by the rate, in the direction of its gradient's sign (arXiv 1802.04434)."""

    type: Literal["signsgd"]
    weight_decay: NotNegative = 0.0
    """Decoupled; norms and biases are left out."""


OPTIMIZERS = (AdamW, Muon, SGD, SignSGD)
Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")]
    | Annotated[Muon, Tag("muon")]
    | Annotated[SGD, Tag("sgd")]
    | Annotated[SignSGD, Tag("signsgd")],
    variant("type", default="adamw"),
]
