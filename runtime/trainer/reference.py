"""The fixed reference that a loss compares with: the weights that the run began with.

Beside adapters these are the model itself without them. Otherwise they are a second model, sharded like the
first, which nothing trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.forward_only import forward_only
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.model import Model
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
    """The model that is trained, as it is below its adapters."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def logprobs(self, micro: Prepared) -> Tensor:
        with lora.silent(self._model):
            return _asked(self._model, micro)


def make_reference(
    model: Model, path: Path, settings: Trainer, compute_dtype: str, meshes: Meshes
) -> Reference:
    """Of ``model``, which began with the weights at ``path``; all ranks call it together."""
    if settings.lora:
        return WithoutAdapters(model)
    return FrozenCopy(build(path, settings, compute_dtype, meshes))


def _asked(model: Model, micro: Prepared) -> Tensor:
    with forward_only(model):
        logprobs, _ = model(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)
    return logprobs.float()
