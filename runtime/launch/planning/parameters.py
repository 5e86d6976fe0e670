"""How many parameters a model has, and where: counted from its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from stackrl.runtime.trainer.models.shape import (
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    Mlp,
    Shape,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, or one matrix of every expert of a layer."""

    name: str
    """The last part of its name, as `trainer.lora.targets` takes it."""
    inputs: int
    outputs: int
    experts: int = 0
    """How many experts have one; 0: it is none of theirs."""
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * max(self.experts, 1)

    def adapter(self, rank: int) -> int:
        """Parameters of LoRA's A [rank, in] and B [out, rank]."""
        return rank * (self.inputs + self.outputs) * max(self.experts, 1)


@dataclass(frozen=True)
class LayerParameters:
    """One block."""

    dense: int
    """Attention, norms, the MLP, and of a mixture the shared one; not what follows."""
    router: int = 0
    experts: int = 0
    """All of the layer's."""
    chosen: int = 0
    """Of those, what a token goes through."""
    indexer: int = 0
    """Of sparse attention; it is not trained."""

    @property
    def total(self) -> int:
        return self.dense + self.router + self.experts + self.indexer


@dataclass(frozen=True)
class Parameters:
    """A whole model."""

    embedding: int
    head: int
    """0 where it is the embedding."""
    norm: int
    layers: tuple[LayerParameters, ...]

    @property
    def outer(self) -> int:
        """What is in no layer."""
        return self.embedding + self.head + self.norm

    @property
    def total(self) -> int:
        return self.outer + sum(layer.total for layer in self.layers)

    @property
    def multiplied(self) -> int:
        """What a token is multiplied with on its way: its own experts, and not the embedding but the head."""
        layers = (layer.total - layer.experts + layer.chosen for layer in self.layers)
        return (self.head or self.embedding) + sum(layers)


@lru_cache(maxsize=8)
def parameters_of(shape: Shape) -> Parameters:
    """Those of a model of ``shape``. A plan asks again and again."""
    rows = shape.vocabulary * shape.hidden
    counted: dict[Layer, LayerParameters] = {}  # most layers are alike
    for layer in shape.layers:
        if layer not in counted:
            counted[layer] = _of_layer(layer, shape.hidden)
    layers = tuple(counted[layer] for layer in shape.layers)
    return Parameters(rows, 0 if shape.tied else rows, shape.hidden, layers)


def linears(layer: Layer, hidden: int) -> Iterator[Linear]:
    """Those of a block that adapters can stand beside."""
    match layer.attention:
        case GroupedAttention() as grouped:
            yield from _of_grouped(grouped, hidden)
        case LatentAttention() as latent:
            yield from _of_latent(latent, hidden)
    match layer.mlp:
        case Mlp() as mlp:
            yield from _of_mlp(mlp.intermediate, hidden, bias=mlp.bias)
        case Experts() as experts:
            yield from _of_mlp(experts.intermediate, hidden, experts=experts.number)
            if experts.shared:
                yield from _of_mlp(experts.shared, hidden)


def _of_grouped(attention: GroupedAttention, hidden: int) -> Iterator[Linear]:
    queries = attention.heads * attention.head_size
    keys = attention.key_value_heads * attention.head_size
    yield Linear("q_proj", hidden, queries, bias=attention.bias)
    yield Linear("k_proj", hidden, keys, bias=attention.bias)
    yield Linear("v_proj", hidden, keys, bias=attention.bias)
    yield Linear("o_proj", queries, hidden, bias=attention.output_bias)


def _of_latent(attention: LatentAttention, hidden: int) -> Iterator[Linear]:
    head = attention.plain_size + attention.rotary_size
    narrow = attention.key_value_rank
    both = attention.heads * (attention.plain_size + attention.value_size)
    yield Linear("q_a_proj", hidden, attention.query_rank, bias=attention.bias)
    yield Linear("q_b_proj", attention.query_rank, attention.heads * head)
    yield Linear("kv_a_proj_with_mqa", hidden, narrow + attention.rotary_size, bias=attention.bias)
    yield Linear("kv_b_proj", narrow, both)
    yield Linear("o_proj", attention.heads * attention.value_size, hidden, bias=attention.bias)


def _of_mlp(intermediate: int, hidden: int, experts: int = 0, bias: bool = False) -> Iterator[Linear]:
    yield Linear("gate_proj", hidden, intermediate, experts, bias)
    yield Linear("up_proj", hidden, intermediate, experts, bias)
    yield Linear("down_proj", intermediate, hidden, experts, bias)


def _of_layer(layer: Layer, hidden: int) -> LayerParameters:
    matrices = list(linears(layer, hidden))
    dense = sum(linear.weights + linear.outputs * linear.bias for linear in matrices if not linear.experts)
    dense += 2 * hidden + _inner_norms(layer.attention)
    experts = sum(linear.weights for linear in matrices if linear.experts)
    mixture = isinstance(layer.mlp, Experts)
    return LayerParameters(
        dense,
        router=layer.mlp.number * hidden if mixture else 0,
        experts=experts,
        chosen=experts * layer.mlp.chosen // layer.mlp.number if mixture else 0,
        indexer=_of_indexer(layer.attention, hidden),
    )


def _inner_norms(attention: GroupedAttention | LatentAttention) -> int:
    if isinstance(attention, LatentAttention):
        return attention.query_rank + attention.key_value_rank
    heads = attention.heads + attention.key_value_heads
    return attention.head_size * {"none": 0, "head": 2, "whole": heads}[attention.norm]


def _of_indexer(attention: GroupedAttention | LatentAttention, hidden: int) -> int:
    if isinstance(attention, GroupedAttention) or not attention.indexer.own:
        return 0
    indexer = attention.indexer
    queries = attention.query_rank * indexer.heads * indexer.size
    return queries + hidden * (indexer.size + indexer.heads) + 2 * indexer.size
