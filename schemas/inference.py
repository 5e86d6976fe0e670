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
    cache_memory: Size = "1GiB"
    """KV cache of an engine on CPU. On a GPU `gpu_memory` decides."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that an engine takes where it has the GPU to itself."""
    compile: bool = True
    """Compile and capture graphs on GPUs. Engines on CPU always run eagerly."""
    arguments: dict[str, JsonValue] = {}
    """Further arguments of vLLM's server, by their names without dashes in front: `{block-size: 32}`."""


class _Weights(Model):
    kv: Literal["keep", "recompute"] = "keep"
    """A running request's cache at an update: `keep` the older version's keys, or `recompute` them."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds that an update of an engine may take."""


class PullWeights(_Weights):
    """Engines fetch new weights from the trainer over HTTP."""

    transport: Literal["pull"] = "pull"
    """How new weights travel."""


class FolderWeights(_Weights):
    """The trainer writes new weights to a folder that it shares with the engines."""

    transport: Literal["folder"]
    """How new weights travel."""
    path: str | None = None
    """The folder; by default one in the run's own folder."""


class NcclWeights(_Weights):
    """Collective broadcast between GPUs."""

    transport: Literal["nccl"]
    """How new weights travel."""


Weights = Annotated[
    Annotated[PullWeights, Tag("pull")]
    | Annotated[FolderWeights, Tag("folder")]
    | Annotated[NcclWeights, Tag("nccl")],
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
