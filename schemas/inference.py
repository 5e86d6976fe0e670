"""`inference:` the engines, and `weights:` how new versions reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Tag

from stackrl.schemas.base import Model, Size, variant
from stackrl.schemas.changes import partial


class Inference(Model):
    """The vLLM engines."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    quantization: Literal["fp8"] | None = None
    """Quantise the weights when they are loaded."""
    max_model_length: int = Field(default=4096, ge=16)
    """Longest sequence that an engine holds: prompt and reply."""
    max_requests: int = Field(default=256, ge=1)
    """Requests that an engine runs at once."""
    concurrency: Literal["adaptive"] | Annotated[int, Field(ge=1)] = "adaptive"
    """Rollouts that an engine has at once: as many as its cache has room for (`adaptive`), or a number; never
    more than `max_requests`."""
    cache_memory: Size = "1GiB"
    """KV cache of an engine on CPU. On a GPU `gpu_memory` decides."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that an engine takes where it has the GPU to itself."""
    compile: bool = True
    """Compile and capture graphs on GPUs. Engines on CPU always run eagerly."""
    arguments: dict[str, JsonValue] = {}
    """Further arguments of vLLM's server, by their names without dashes in front: `{block-size: 32}`."""

    @property
    def most_rollouts(self) -> int:
        """That an engine ever has at once."""
        return self.max_requests if self.concurrency == "adaptive" else self.concurrency


class _Weights(Model):
    kv: Literal["keep", "recompute"] = "keep"
    """A running request's cache at an update: `keep` the older version's keys, or `recompute` them."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds that an update of an engine may take."""


Content = Literal["full", "delta"]


class PullWeights(_Weights):
    """Engines fetch new weights from the trainer over HTTP."""

    transport: Literal["pull"] = "pull"
    """How new weights travel."""
    content: Content = "full"
    """`delta`: only what changed since the version that an engine has, which it then keeps in its machine's
    memory. To the bit the same; worth it where the model is bfloat16 and the network slow."""


class FolderWeights(_Weights):
    """The trainer writes new weights to a folder that it shares with the engines."""

    transport: Literal["folder"]
    """How new weights travel."""
    path: str | None = None
    """The folder; by default one in the run's own folder."""
    content: Content = "full"
    """`delta`: only what changed since the version before, and all of it now and then. Trainer and engines
    keep the version before in their machines' memory."""


class CollectiveWeights(_Weights):
    """The trainer broadcasts new weights to all engines at once; one that comes late fetches them alone."""

    transport: Literal["collective"]
    """How new weights travel."""
    backend: Literal["gloo", "nccl"] | None = None
    """What carries them: by default nccl between GPUs, gloo between CPUs."""
    bucket: Size = "256MiB"
    """Tensors that travel as one; a larger tensor travels in slices of this size. The trainer and each engine
    hold two."""
    gather: float = Field(default=5.0, gt=0)
    """Seconds that a broadcast waits for an engine that has taken the version before, and does not come."""


Weights = Annotated[
    Annotated[PullWeights, Tag("pull")]
    | Annotated[FolderWeights, Tag("folder")]
    | Annotated[CollectiveWeights, Tag("collective")],
    variant("transport", default="pull"),
]


class Sampling(Model):
    """How replies are sampled. top-p and top-k are left out on purpose: the engine would report logprobs of
    the truncated distribution, and the trainer could not compute the same."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Divides the logits; the trainer divides by the same."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest reply of one turn, in tokens."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that one rollout may take, environment and generation together."""


SamplingChange = partial("SamplingChange", Sampling)
