"""`trainer:` how the weights are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.activations import Checkpointing
from stackrl.schemas.base import Model, untouched
from stackrl.schemas.lora import Lora
from stackrl.schemas.mixture import Mixture
from stackrl.schemas.optimizers import AdamW, Optimizer

Degree = Annotated[int, Field(ge=1)]


class Parallel(Model):
    """Degrees of parallelism. What is left out is derived and shown by `stackrl plan`."""

    replicate: Degree | None = None
    """Copies of the sharded model (HSDP); divides the ranks. By default 1."""
    context: Degree | None = None
    """Ranks that share the tokens of a micro-batch; divides the ranks of one copy. By default 1."""
    expert: Degree | None = None
    """Ranks that share the experts of a layer; divides their number and the ranks of one copy. By default as
    many as do."""


class Trainer(Model):
    """The FSDP2 trainer."""

    sequence_length: int = Field(default=4096, ge=16)
    """Longest sequence, and the tokens that a packed micro-batch holds at most."""
    parallel: Parallel = untouched(Parallel)
    mixture: Mixture = untouched(Mixture)
    """How experts are chosen, in a model that has them."""
    optimizer: Optimizer = untouched(AdamW)
    """How a gradient becomes a step, and how the rate changes over a stage."""
    lora: Lora | None = None
    """Train adapters beside frozen weights; by default all weights are trained."""
    activation_checkpointing: Checkpointing = "none"
    """What the backward pass computes again instead of keeping it: nothing, each whole layer (`full`), or
    named parts of it: `{type: selective, parts: [norms, mlp]}`."""
    activation_offloading: bool = False
    """Move what layers keep for the backward pass to host memory until it is needed."""
    compile: bool = False
    """Compile each layer with torch.compile: the first steps take minutes, later ones are faster."""
    optimizer_offload: bool = False
    """Keep masters, summed gradients and optimizer state in host memory, and step there."""
    reshard_after_forward: bool = True
    """Let go of a layer's gathered weights between its forward and its backward pass; `false` gathers them
    once, and takes the memory of the whole model."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the matrix products; by default the model's dtype. Masters stay float32."""
    head_chunk: int = Field(default=512, ge=1)
    """Tokens per chunk of the language-model head, which never holds tokens × vocabulary."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; by default the cores that the plan deals it."""
