"""torch.compile for the layers of a model.

Applied from outside, before `activations.keep_less`: what is computed again is then compiled too.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch

from stackrl.runtime.trainer.models.latent import LatentAttention
from stackrl.runtime.trainer.models.mlp import Mixture
from stackrl.runtime.trainer.models.shape import ModelError

if TYPE_CHECKING:  # benchmarks/gpu_trainer.py runs where there is no pydantic
    from stackrl.runtime.trainer.models.model import Model


def compile_layers(model: Model, device: str) -> None:
    """Compile each layer when it first runs on ``device``, for micro-batches of any size.

    What depends on the lengths of documents (attention) or on the router's choice (experts) runs as it is, in
    between. Raises ModelError where that cannot work.
    """
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise ModelError(
            f"trainer.compile needs a C++ compiler on CPUs, and there is no {compiler}; install it, name "
            "another in the variable CXX, or set trainer.compile to false"
        )
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, Mixture | LatentAttention):
                module.forward = torch.compiler.disable(module.forward)
            elif hasattr(module, "attend"):
                module.attend = torch.compiler.disable(module.attend)
        layer.forward = torch.compile(layer.forward, dynamic=True)
