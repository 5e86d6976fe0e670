"""What a decoder is built from. The families (families/) make it from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


class ModelError(Exception):
    """A model that cannot be used. The text says which, why, and what to do."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), with Llama 3's stretch of the long wavelengths."""

    theta: float
    size: int
    """Dimensions of a head that turn: the first ones, all or fewer."""
    interleaved: bool = False
    """Neighbouring dimensions turn together, instead of those half a head apart."""
    factor: float = 1.0
    """1 leaves the frequencies as they are."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class GroupedAttention:
    """Several query heads share one head of keys and values (arXiv 2305.13245)."""

    heads: int
    key_value_heads: int
    head_size: int
    bias: bool = False
    """Of the projections of queries, keys and values."""
    output_bias: bool = False
    norm: Literal["none", "head", "whole"] = "none"
    """What a norm of queries and keys spans: nothing, one head, all heads together."""


@dataclass(frozen=True)
class Indexer:
    """Which earlier tokens a token attends to: those that a small attention of its own scores highest."""

    heads: int
    size: int
    """Of one head."""
    chosen: int
    """Tokens that a token attends to at most, itself among them."""
    own: bool = True
    """Whether the layer chooses itself, or takes what the layer before it has chosen."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434) to the tokens that an indexer chooses."""

    heads: int
    query_rank: int
    key_value_rank: int
    plain_size: int
    """Dimensions of a head's queries and keys without position."""
    rotary_size: int
    """Dimensions with it; the keys' are the same for all heads."""
    value_size: int
    bias: bool
    indexer: Indexer


@dataclass(frozen=True)
class Mlp:
    """SwiGLU (arXiv 2002.05202)."""

    intermediate: int
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs, of which each token goes through a few."""

    number: int
    chosen: int
    """Experts that a token goes through."""
    intermediate: int
    """Width inside one expert."""
    score: Literal["softmax", "sigmoid"]
    """Softmax scores are computed in the model's type, sigmoid ones in float32, as the engines do."""
    corrected: bool = False
    """Whether a bias for each expert takes part in the choice (arXiv 2408.15664), but not in the weights."""
    groups: int = 1
    groups_chosen: int = 1
    """A token's experts come from so many of the groups (arXiv 2412.19437)."""
    normalized: bool = True
    """Whether the weights of a token's experts are made to sum to one."""
    scale: float = 1.0
    """What the weights are multiplied with at the end."""
    shared: int = 0
    """Width of the MLP that all tokens go through besides; 0: none."""

    def __post_init__(self) -> None:
        """Raises ModelError where no token could find its experts."""
        if self.number % self.groups or (self.groups > 1 and self.number < 2 * self.groups):
            raise ModelError(
                f"{self.number} experts do not make {self.groups} groups of two or more; set n_group to 1"
            )
        allowed = self.number // self.groups * min(self.groups_chosen, self.groups)
        if self.chosen > allowed:
            raise ModelError(
                f"a token cannot go through {self.chosen} of {allowed} experts; set num_experts_per_tok to "
                f"{allowed} or less"
            )


@dataclass(frozen=True)
class Layer:
    """One block of the decoder."""

    attention: GroupedAttention | LatentAttention
    mlp: Mlp | Experts


@dataclass(frozen=True)
class Names:
    """How the files of a family name what the decoder names as transformers does most often."""

    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """One expert's matrices: gate, up, down."""
    parts: tuple[tuple[str, str], ...] = ()
    """Parts of a name, ours and the files', applied in turn."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors that the trainer has no use for."""


@dataclass(frozen=True)
class Shape:
    """Everything that the decoder is built from."""

    vocabulary: int
    hidden: int
    epsilon: float
    rope: Rope
    tied: bool
    """One matrix for embedding and head."""
    layers: tuple[Layer, ...]
    names: Names = field(default_factory=Names)
