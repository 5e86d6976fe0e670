"""`trainer:` how the weights are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.base import Model
from stackrl.schemas.optimizers import AdamW, Optimizer

Degree = Annotated[int, Field(ge=1)]


class Parallel(Model):
    """Degrees of parallelism. What is left out is derived and shown by `stackrl plan`."""

    replicate: Degree = 1
    """Copies of the sharded model (HSDP)."""
    context: Degree = 1
    """Ranks that share one sequence."""
    expert: Degree = 1
    """Ranks that share the experts of a layer."""


class Trainer(Model):
    """The FSDP2 trainer."""

    sequence_length: int = Field(default=4096, ge=16)
    """Longest sequence, and the tokens that a packed micro-batch holds at most."""
    parallel: Parallel = Parallel()
    optimizer: Optimizer = AdamW()
    """How a gradient becomes a step, and how the rate changes over a stage."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """`full`: recompute each layer in the backward pass instead of keeping its activations."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the matrix products; by default the model's dtype. Masters stay float32."""
    head_chunk: int = Field(default=1024, ge=1)
    """Tokens per chunk of the language-model head, which never holds tokens × vocabulary."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; by default the cores that the plan deals it."""
