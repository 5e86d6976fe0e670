"""What one layer of the trainer's decoder takes while tokens go through it, forward and backward.

Counted from what autograd keeps of runtime/trainer/models: changes there belong here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from stackrl.runtime.trainer.models.shape import (
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    Mlp,
)
from stackrl.schemas.activations import Checkpointing, SelectiveCheckpointing

FLOAT32, INT64 = 4, 8
SCORED_AT_ONCE = 256
"""Tokens whose matches with all earlier ones an indexer has in memory (trainer/models/latent.py)."""


@dataclass(frozen=True)
class Tokens:
    """Of a micro-batch."""

    here: int
    """On this rank."""
    together: int
    """On all ranks that share it."""

    @property
    def ranks(self) -> int:
        return max(self.together // self.here, 1)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes."""

    stored: int
    """Kept from its forward to its backward pass."""
    again: int
    """Computed again in the backward pass, and kept to the end of that."""
    passing: int
    """Besides, for a moment of the backward pass."""
    integers: int = 0
    """Of what is stored, what is not moved to host memory."""


@dataclass(frozen=True)
class _Part:
    kept: int
    """Inside, for its backward pass."""
    passing: int
    """Besides, for a moment of that."""


def layer_memory(
    layer: Layer, hidden: int, tokens: Tokens, size: int, checkpointing: Checkpointing
) -> LayerMemory:
    """Of ``layer``, which works on states of width ``hidden`` with numbers of ``size`` bytes."""
    states = tokens.here * hidden * size
    attention = _attention(layer.attention, tokens, size)
    mlp, experts, between = _mlp(layer.mlp, hidden, tokens, size)
    between += 3 * states  # what attention and MLP read, and their residual
    # when attention's turn comes in the backward pass, what the MLP kept is gone
    late = attention.passing - mlp.kept - experts.kept
    passing = max(mlp.passing + experts.passing + 2 * states, late + 2 * states)
    recomputed = {"attention": attention.kept, "mlp": mlp.kept, "experts": experts.kept}
    whole = sum(recomputed.values()) + between
    choice = 0
    match checkpointing:
        case "none":
            again = 0
        case "full":
            again, choice = whole, _choice(layer.attention, tokens)
        case SelectiveCheckpointing():
            again = sum(recomputed.get(part, 0) for part in set(checkpointing.parts))
            choice = _choice(layer.attention, tokens) if "attention" in checkpointing.parts else 0
    return LayerMemory(states + choice + whole - again, again, passing, choice)


def _attention(attention: GroupedAttention | LatentAttention, tokens: Tokens, size: int) -> _Part:
    if isinstance(attention, LatentAttention):
        return _latent(attention, tokens, size)
    queries = attention.heads * attention.head_size
    # heads of keys are repeated where there are fewer than ranks that share the tokens
    copies = tokens.ranks // gcd(tokens.ranks, attention.key_value_heads)
    keys = attention.key_value_heads * attention.head_size
    normed = 0 if attention.norm == "none" else queries + keys
    # into the kernel go a query, a key and a value, out comes one result, which is put in order once more
    kept = normed + 2 * queries + queries + 2 * keys * copies
    # gradients of these, those of keys once for each head of queries
    shared = 2 * queries if attention.heads > attention.key_value_heads else 0
    passing = 2 * queries + 2 * keys * copies + shared
    statistics = attention.heads * FLOAT32
    return _Part(tokens.here * (kept * size + statistics), tokens.here * passing * size)


def _latent(attention: LatentAttention, tokens: Tokens, size: int) -> _Part:
    head = attention.plain_size + attention.rotary_size
    narrow = 2 * attention.query_rank + 3 * (attention.key_value_rank + attention.rotary_size)
    query, key = attention.heads * head, attention.heads * (head + attention.value_size)
    result = attention.heads * attention.value_size
    kept = tokens.here * (narrow + query + 2 * result) * size + tokens.together * key * size
    # before the kernel keys and values lie beside what they are made of, after it the gradients of both
    plain = attention.heads * (attention.plain_size + attention.value_size + head)
    before = (tokens.here * query + tokens.together * plain) * size
    after = 2 * (tokens.here * query + tokens.together * key) * size
    indexer = attention.indexer
    if tokens.together > indexer.chosen:
        pairs = tokens.here * tokens.together
        kept += pairs * size  # the kernel's mask
        before += 3 * pairs  # what that is made of, a byte each
        matches = 2 * min(SCORED_AT_ONCE, tokens.here) * indexer.heads * tokens.together * FLOAT32
        before = max(before, matches if indexer.own else 0)
    passing = max(before, after)
    return _Part(kept, passing)


def _choice(attention: GroupedAttention | LatentAttention, tokens: Tokens) -> int:
    """Which tokens sparse attention looks at: what a layer without an indexer of its own is given by the one
    before it, and keeps where it runs again."""
    if isinstance(attention, GroupedAttention) or attention.indexer.own:
        return 0
    if tokens.together <= attention.indexer.chosen:
        return 0
    return tokens.here * attention.indexer.chosen * INT64


def _mlp(mlp: Mlp | Experts, hidden: int, tokens: Tokens, size: int) -> tuple[_Part, _Part, int]:
    """Of the dense or shared part, of the experts, and what is kept on the way to these and back."""
    if isinstance(mlp, Mlp):
        return _gated(tokens.here, mlp.intermediate, size), _Part(0, 0), 0
    rows = tokens.here * mlp.chosen
    experts = _gated(rows, mlp.intermediate, size)
    # a token's results are weighted in float32, and so is the gradient of each
    weighted = 2 * rows * hidden * FLOAT32
    scores = tokens.here * mlp.number * FLOAT32 + (tokens.here * hidden * FLOAT32 if _wide(mlp) else 0)
    there_and_back = 2 * rows * hidden * size
    shared = _gated(tokens.here, mlp.shared, size)
    return (
        _Part(shared.kept, 0),
        _Part(experts.kept, max(experts.passing, weighted)),
        there_and_back + scores,
    )


def _wide(experts: Experts) -> bool:
    """Whether the router's product is in float32."""
    return experts.score == "sigmoid"


def _gated(rows: int, intermediate: int, size: int) -> _Part:
    """Gate, up and their product are kept; the product's part is free when the gradients of all are there."""
    return _Part(3 * rows * intermediate * size, 2 * rows * intermediate * size)
