"""What a GPU of an engine holds: its part of the weights, room to compute, and the cache in what is left.

As vLLM divides them; docs/planning.md says what is counted and from where.
"""

from __future__ import annotations

from dataclasses import dataclass

from stackrl.runtime.launch.planning.parameters import linears, parameters_of
from stackrl.runtime.trainer.models.shape import Experts, GroupedAttention, LatentAttention, Layer, Mlp, Shape
from stackrl.schemas.inference import Inference

FLOAT32, FLOAT8 = 4, 1
INDEX_SCALE = 4
"""Bytes of the scale beside an indexer's cached key, which is in float8."""
GRAPHS = 768 << 20
"""Bytes of captured graphs (`inference.compile`), and of what kernels work in."""
_LARGE, _LARGEST = 70 << 30, 160 << 30
"""Memory from which vLLM prefills more tokens at a time."""
_NOT_CUT = ("q_a_proj", "kv_a_proj_with_mqa")
"""Linear layers that every GPU of an engine has whole."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine's memory depends on besides the model."""

    inference: Inference
    size: int
    """Bytes of a number in what is computed."""
    batched: int
    """Tokens that go through the layers at a time, at most."""
    copies: int = 1
    """Of the model in an engine, which share its experts."""

    @property
    def gpus(self) -> int:
        """Of a copy."""
        return self.inference.tensor_parallel


def batched_tokens(inference: Inference, memory: int | None) -> int:
    """Tokens that vLLM takes through the layers at a time, on a GPU of ``memory`` bytes; None: on a CPU."""
    if memory is None:  # inference/server.py sets it
        return max(inference.max_model_length, inference.max_requests, 4096)
    said = inference.arguments.get("max-num-batched-tokens")
    if isinstance(said, int):
        return said
    return 16384 if memory >= _LARGEST else 8192 if memory >= _LARGE else 2048


def weight_bytes(shape: Shape, settings: EngineSettings) -> int:
    """Of one GPU's part of the model."""
    parameters, gpus = parameters_of(shape), settings.gpus
    outer = (parameters.embedding + parameters.head) // gpus + parameters.norm
    layers = {layer: _layer_bytes(layer, shape.hidden, settings) for layer in set(shape.layers)}
    return outer * settings.size + sum(layers[layer] for layer in shape.layers)


def arriving_bytes(shape: Shape, settings: EngineSettings) -> int:
    """While new weights are loaded: a layer, not quantised yet, and what waits for the end of all."""
    parameters = parameters_of(shape)
    layer = max(layer.total for layer in parameters.layers) // settings.gpus
    outer = (parameters.embedding + parameters.head) // settings.gpus
    return (layer + outer) * settings.size


def cache_bytes_per_token(shape: Shape, settings: EngineSettings) -> int:
    """Keys and values of one token, on all GPUs of an engine together."""
    said = str(settings.inference.arguments.get("kv-cache-dtype", ""))
    size = FLOAT8 if said.startswith("fp8") else settings.size
    return sum(_cached(layer.attention, settings.gpus, size) for layer in shape.layers)


def working_bytes(shape: Shape, settings: EngineSettings) -> int:
    """For the tokens that go through a layer at a time, and the sampler's logits."""
    widest = max(_width(layer, settings.gpus) for layer in set(shape.layers))
    states = settings.batched * (4 * shape.hidden + widest) * settings.size
    # logits of every running request in float32: as they are, sorted out, and as logprobs
    logits = 3 * settings.inference.max_requests * shape.vocabulary * FLOAT32
    return states + logits


def _layer_bytes(layer: Layer, hidden: int, settings: EngineSettings) -> int:
    """Matrices may be quantised; routers and norms are not, and every GPU has them."""
    linear_size = FLOAT8 if settings.inference.quantization == "fp8" else settings.size
    total = 2 * hidden * settings.size
    if isinstance(layer.mlp, Experts):
        total += layer.mlp.number * hidden * settings.size
    for linear in linears(layer, hidden):
        whole = linear.name in _NOT_CUT
        parts = 1 if whole else settings.gpus * (settings.copies if linear.experts else 1)
        if linear.name in ("k_proj", "v_proj"):
            parts = min(parts, layer.attention.key_value_heads)
        total += linear.weights // parts * linear_size
    if isinstance(layer.attention, LatentAttention) and layer.attention.indexer.own:
        indexer = layer.attention.indexer
        queries = layer.attention.query_rank * indexer.heads * indexer.size
        total += (queries + hidden * (indexer.size + indexer.heads)) * linear_size
    return total


def _cached(attention: GroupedAttention | LatentAttention, gpus: int, size: int) -> int:
    """Of one token in one layer. Heads of keys are cut over the GPUs as far as they go; what latent attention
    keeps has no heads, and every GPU keeps it."""
    if isinstance(attention, GroupedAttention):
        heads = max(attention.key_value_heads, gpus)
        return 2 * heads * attention.head_size * size
    indexed = attention.indexer.size * FLOAT8 + INDEX_SCALE if attention.indexer.own else 0
    return gpus * ((attention.key_value_rank + attention.rotary_size) * size + indexed)


def _width(layer: Layer, gpus: int) -> int:
    """Numbers of a token inside the widest part of a layer, on one GPU."""
    match layer.attention:
        case GroupedAttention() as grouped:
            attention = (2 * grouped.heads + 2 * grouped.key_value_heads) * grouped.head_size
        case LatentAttention() as latent:
            attention = 3 * latent.heads * (latent.key_value_rank + latent.rotary_size)
    match layer.mlp:
        case Mlp() as mlp:
            inside = 3 * mlp.intermediate
        case Experts() as experts:
            inside = 3 * (experts.chosen * experts.intermediate + experts.shared)
    return max(attention, inside) // gpus
