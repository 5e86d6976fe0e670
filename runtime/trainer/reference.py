"""The fixed reference that a loss compares with: the weights that the run began with.

Beside adapters these are the model itself without them. Otherwise they are a second model, sharded like the
first, which nothing trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.forward_only import forward_only
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.model import Model
from stackrl.runtime.trainer.models.names import FLOAT32
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.prepared import Prepared
from stackrl.schemas.trainer import Trainer


class Reference(ABC):
    """Tells what the first weights say. All ranks ask it together, as they do the model."""

    @abstractmethod
    def logprobs(self, micro: Prepared) -> Tensor:
        """float32 [n] of the trained tokens that are predicted here, without gradient."""


class FrozenCopy(Reference):
    """A model of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model.requires_grad_(False)

    def logprobs(self, micro: Prepared) -> Tensor:
        return _asked(self._model, micro)


class WithoutAdapters(Reference):
    """The model that is trained, as it is below its adapters, its experts chosen as they were at first."""

    def __init__(self, model: Model) -> None:
        """``model`` still has the weights that the run began with."""
        self._model = model
        self._first_biases = [bias.clone() for bias in _biases(model)]

    def logprobs(self, micro: Prepared) -> Tensor:
        with lora.silent(self._model), self._as_at_first():
            return _asked(self._model, micro)

    @contextmanager
    def _as_at_first(self) -> Iterator[None]:
        """Within, the routers have the biases that balancing has moved since."""
        biases = _biases(self._model)
        now = [bias.clone() for bias in biases]
        try:
            _copy(self._first_biases, biases)
            yield
        finally:
            _copy(now, biases)


def make_reference(
    model: Model, path: Path, settings: Trainer, compute_dtype: str, meshes: Meshes
) -> Reference:
    """Of ``model``, which began with the weights at ``path``; all ranks call it together."""
    if settings.lora:
        return WithoutAdapters(model)
    return FrozenCopy(build(path, settings, compute_dtype, meshes))


def _biases(model: Model) -> list[Tensor]:
    """Of the choice of experts, which are moved though nothing else below the adapters is."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith(FLOAT32)]


def _copy(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for value, place in zip(values, places, strict=True):
            place.copy_(value)


def _asked(model: Model, micro: Prepared) -> Tensor:
    with forward_only(model):
        logprobs, _ = model(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)
    return logprobs.float()
