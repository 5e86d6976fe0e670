"""What a rank of the trainer holds: at the head, in the backward pass of a layer, at the step, at publishing.

Masters, summed gradients and moments are float32 and cut over the ranks of a copy (FSDP2); layers are
gathered, in the type that is computed in, when they run. docs/planning.md has the formulas and how near they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stackrl.runtime.launch.planning.layer_memory import FLOAT32, LayerMemory, Tokens, layer_memory
from stackrl.runtime.launch.planning.parameters import LayerParameters, linears, parameters_of
from stackrl.runtime.trainer.models.shape import Experts, Layer, Shape
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.lora import Lora
from stackrl.schemas.optimizers import SGD, AdamW, Muon, Optimizer, SignSGD
from stackrl.schemas.trainer import Trainer

SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
SOFTMAX_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits whose softmax is computed at a time (trainer/head.py)."""
ALLOCATOR_SHARE = 0.09
"""What torch's allocator on GPUs holds on top of what is in use: by so much the published peaks, which are of
what it holds, are on average above what is counted here."""


@dataclass(frozen=True)
class Settings:
    """What the trainer's memory depends on besides the model."""

    trainer: Trainer
    degrees: Degrees
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """The model's, in which weights are published."""
    optimizers: Sequence[Optimizer]
    """Of the stages; the largest counts."""
    reference: bool = False
    """Whether the first weights are kept as a second model (trainer/reference.py)."""

    def __hash__(self) -> int:
        """By what tells most of those that a plan asks for apart; lists of the stack have no hash."""
        return hash((self.degrees, self.device, self.dtype))

    @property
    def compute(self) -> int:
        """Bytes of a number in the matrix products."""
        return SIZES[self.trainer.compute_dtype or self.dtype]

    @property
    def copy(self) -> int:
        """Ranks that share one copy of the model."""
        return self.degrees.shard * self.degrees.context

    @property
    def gathers(self) -> bool:
        """Whether layers are gathered, and cast, when they run (parallelize.shard)."""
        return self.degrees.ranks > 1 or self.compute != FLOAT32 or self.trainer.optimizer_offload

    @property
    def on_host(self) -> bool:
        """Whether shards and moments leave the GPU."""
        return self.trainer.optimizer_offload and self.device != "cpu"

    @property
    def stows(self) -> bool:
        """Whether activations do."""
        return self.trainer.activation_offloading and self.device != "cpu"


@dataclass(frozen=True)
class Held:
    """Numbers that a rank holds, and those that it gathers."""

    masters: int
    trained: int
    """Of the masters, those with a gradient."""
    layer: int
    """Of the largest layer, gathered."""
    layer_trained: int
    outer: int
    """Embedding, head and last norm, gathered."""
    outer_trained: int
    everything: int
    """Of the whole model as it is gathered, without the experts of other ranks."""
    largest: int
    """Of the largest tensor of the model."""
    square: int
    """Of the largest matrix, or stack of matrices, that Muon has whole."""


@lru_cache(maxsize=64)
def held(shape: Shape, settings: Settings) -> Held:
    """What a rank has of a model of ``shape``. A plan asks again and again."""
    parameters, adapters = parameters_of(shape), settings.trainer.lora
    share = settings.degrees.expert
    counted = dict(zip(shape.layers, parameters.layers, strict=True))  # most layers are alike
    layers = {
        layer: _gathered(layer, numbers, shape.hidden, share, adapters) for layer, numbers in counted.items()
    }
    added = sum(_adapters(layer, shape.hidden, adapters) for layer in shape.layers) if adapters else 0
    frozen = sum(layer.indexer for layer in parameters.layers)
    if settings.trainer.mixture.frozen_router:
        frozen += sum(layer.router for layer in parameters.layers)
    trained = added if adapters else parameters.total - frozen
    biggest = max(layers.values())
    tensors = [_largest(layer, shape.hidden) for layer in layers]
    whole = [_largest(layer, shape.hidden, share if settings.copy > share > 1 else 0) for layer in layers]
    return Held(
        masters=-(-(parameters.total + added) // settings.copy),
        trained=-(-trained // settings.copy),
        layer=biggest[0],
        layer_trained=biggest[1],
        outer=parameters.outer,
        outer_trained=0 if adapters else parameters.outer,
        everything=parameters.outer + sum(layers[layer][0] for layer in shape.layers),
        largest=max(parameters.embedding, *tensors),
        square=max(whole),
    )


def _gathered(
    layer: Layer, counted: LayerParameters, hidden: int, ranks: int, adapters: Lora | None
) -> tuple[int, int]:
    """Numbers of a layer where ``ranks`` share its experts, and those of them with a gradient."""
    own = counted.total - counted.experts + counted.experts // ranks
    added = _adapters(layer, hidden, adapters, ranks)
    return own + added, added if adapters else own - counted.indexer


def _adapters(layer: Layer, hidden: int, settings: Lora | None, ranks: int = 1) -> int:
    if settings is None:
        return 0
    return sum(
        linear.adapter(settings.rank) // (ranks if linear.experts else 1)
        for linear in linears(layer, hidden)
        if settings.targets is None or linear.name in settings.targets
    )


def _largest(layer: Layer, hidden: int, ranks: int | None = None) -> int:
    """Numbers of the layer's largest tensor: gate and up of all experts are one.

    ``ranks``: where so many share the experts, what one has of them; with 0, stacks lie whole on their ranks
    and one of their matrices is worked on at a time.
    """
    sizes = [linear.weights for linear in linears(layer, hidden) if not linear.experts]
    if isinstance(layer.mlp, Experts):
        matrix = 2 * hidden * layer.mlp.intermediate
        sizes.append(matrix * (layer.mlp.number // (ranks or 1) if ranks != 0 else 1))
    return max(sizes)


def tokens_of(settings: Settings) -> Tokens:
    """Of a full micro-batch."""
    together = settings.trainer.sequence_length
    return Tokens(-(-together // settings.degrees.context), together)


@lru_cache(maxsize=64)
def layers_memory(shape: Shape, settings: Settings) -> tuple[LayerMemory, ...]:
    """One for each layer, in their order. A plan asks again and again."""
    tokens, way = tokens_of(settings), settings.trainer.activation_checkpointing
    counted = {
        layer: layer_memory(layer, shape.hidden, tokens, settings.compute, way) for layer in set(shape.layers)
    }
    return tuple(counted[layer] for layer in shape.layers)


def trainer_phases(shape: Shape, settings: Settings) -> dict[str, dict[str, int]]:
    """Bytes on the device by phase and part; without GPUs, of the process."""
    numbers, layers = held(shape, settings), layers_memory(shape, settings)
    kept = _stored(layers, settings) + _of_tokens(shape, settings)
    busiest = max(layer.again + layer.passing for layer in layers)
    state = _state(numbers, settings)
    outer = numbers.outer * settings.compute if settings.gathers else 0
    keeps = settings.gathers and not settings.trainer.reshard_after_forward
    gathered = numbers.everything * settings.compute if keeps else 0
    # while a layer runs, the next one arrives
    running = gathered or outer + 2 * numbers.layer * settings.compute * settings.gathers
    return {
        "head": {
            **state,
            "activations": kept,
            "logits": _head(shape, settings),
            "gathered": gathered or outer,
        },
        "backward": {
            **state,
            "activations": kept,
            "a layer's": busiest,
            "gathered": running,
            "a layer's gradients": _gradients(shape, numbers, settings),
        },
        "optimizer step": {**state, "working": 0 if settings.on_host else _stepping(numbers, settings)},
        "publish": {
            **{name: size for name, size in state.items() if name != "gradients"},
            "whole tensor": 2 * numbers.largest * SIZES[settings.dtype],
        },
    }


def _state(numbers: Held, settings: Settings) -> dict[str, int]:
    """What lasts from step to step, and the sum of gradients."""
    there = 0 if settings.on_host else 1
    return {
        "parameters": there * numbers.masters * FLOAT32,
        "reference": there * settings.reference * numbers.masters * FLOAT32,
        "gradients": there * numbers.trained * FLOAT32,
        "optimizer": there * _moments(numbers, settings),
    }


def _moments(numbers: Held, settings: Settings) -> int:
    return max(moments(optimizer) for optimizer in settings.optimizers) * numbers.trained * FLOAT32


def moments(optimizer: Optimizer) -> int:
    """Numbers that an optimizer has for each parameter; Muon two for those outside of its matrices."""
    match optimizer:
        case AdamW():
            return 2
        case SGD():
            return 1 if optimizer.momentum else 0
        case SignSGD():
            return 0
        case Muon():
            return 1


def _stepping(numbers: Held, settings: Settings) -> int:
    """What a step makes for a moment."""
    sizes = []
    for optimizer in settings.optimizers:
        match optimizer:
            case AdamW():
                sizes.append(0)
            case SGD():
                copies = bool(optimizer.weight_decay) + optimizer.nesterov
                sizes.append(copies * numbers.trained * FLOAT32)
            case SignSGD():
                sizes.append(2 * FLOAT32 * (numbers.largest // settings.copy))
            case Muon():
                # the matrix, its normalised copy and the result in float32; three more as it is multiplied
                sizes.append(numbers.square * (3 * FLOAT32 + 3 * (2 if settings.device == "cuda" else 4)))
    return max(sizes)


def _stored(layers: Sequence[LayerMemory], settings: Settings) -> int:
    """What all layers keep until their backward pass; of what waits in host memory, two layers are here."""
    if not settings.stows:
        return sum(layer.stored for layer in layers)
    moved = [layer.stored - layer.integers for layer in layers]
    return sum(layer.integers for layer in layers) + sum(sorted(moved)[-2:])


def _of_tokens(shape: Shape, settings: Settings) -> int:
    """What is there once: rotations, places and order of tokens, and the states behind the last layer."""
    tokens, size = tokens_of(settings).here, settings.compute
    return tokens * (2 * shape.rope.size * size + 6 * 8 + 4 * shape.hidden * size)


def _head(shape: Shape, settings: Settings) -> int:
    """A chunk of logits, the softmax of some of them, and the gradient of the head's weights (head.py)."""
    chunk = min(settings.trainer.head_chunk, tokens_of(settings).here)
    logits = chunk * shape.vocabulary
    softmax = 3 * FLOAT32 * min(logits, max(SOFTMAX_AT_ONCE[settings.device], shape.vocabulary))
    weights = shape.vocabulary * shape.hidden if settings.trainer.lora is None else 0
    # summed in float32, beside a chunk's part or the result in the type of the weights
    narrow = settings.compute if settings.compute != FLOAT32 else 0
    return logits * settings.compute + softmax + weights * (FLOAT32 + narrow)


def _gradients(shape: Shape, numbers: Held, settings: Settings) -> int:
    """Not summed over ranks yet: a layer's, as computed and in float32, and the head's, which waits."""
    head = shape.vocabulary * shape.hidden if settings.trainer.lora is None else 0
    if not settings.gathers:
        return max(numbers.square * FLOAT32, 0 if settings.trainer.lora else head * FLOAT32)
    return numbers.layer_trained * (settings.compute + FLOAT32) + head * settings.compute


def host_parts(shape: Shape, settings: Settings) -> dict[str, int]:
    """Bytes of a rank in its machine's memory, beside a GPU: what is offloaded, and the copy of weights and
    moments that a checkpoint is written from."""
    numbers = held(shape, settings)
    state = numbers.masters * FLOAT32 + _moments(numbers, settings)
    parts = {"checkpoint": state}
    if settings.on_host:
        parts["parameters, gradients, optimizer"] = state + numbers.trained * FLOAT32
        parts["reference"] = settings.reference * numbers.masters * FLOAT32
    if settings.stows:
        parts["activations"] = sum(layer.stored - layer.integers for layer in layers_memory(shape, settings))
    return parts


def published_bytes(shape: Shape, settings: Settings) -> int:
    """One version of the weights, as engines get it."""
    return parameters_of(shape).total * SIZES[settings.dtype]
