"""Optimizers for a model's parameters, and clipping that is right under sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stackrl.runtime.trainer.muon import Muon
from stackrl.runtime.trainer.sign_sgd import SignSGD
from stackrl.schemas import optimizers as settings_of
from stackrl.schemas.optimizers import Optimizer

T = TypeVar("T", bound=Tensor)

HEAD = "lm_head"
"""In the name of every parameter of the head."""


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """A fresh optimizer for what is trained of ``model``; vectors (norms and biases) do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = settings.learning_rate
    match settings:
        case settings_of.AdamW():
            moments = {"betas": settings.betas, "eps": settings.epsilon}
            return torch.optim.AdamW(_groups(parameters, settings), lr=rate, **moments, fused=True)
        case settings_of.SGD():
            momentum = {"momentum": settings.momentum, "nesterov": settings.nesterov}
            return torch.optim.SGD(_groups(parameters, settings), lr=rate, **momentum, foreach=True)
        case settings_of.SignSGD():
            return SignSGD(_groups(parameters, settings), rate)
        case settings_of.Muon():
            return _make_muon(model, parameters, settings)


def _make_muon(model: nn.Module, parameters: list[nn.Parameter], settings: settings_of.Muon) -> Muon:
    """Muon for the matrices that turn hidden states into hidden states."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outer |= {id(parameter) for name, parameter in model.named_parameters() if HEAD in name.split(".")}
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in outer]
    others = [p for p in parameters if p.ndim < 2 or id(p) in outer]
    orthogonal = {
        "momentum": settings.momentum,
        "nesterov": settings.nesterov,
        "iterations": settings.iterations,
    }
    moments = {"betas": settings.betas, "eps": settings.epsilon}
    return Muon(
        [group | orthogonal for group in _groups(matrices, settings)],
        [group | moments for group in _groups(others, settings)],
        settings.learning_rate,
    )


def _groups(parameters: list[nn.Parameter], settings: Optimizer) -> list[dict[str, Any]]:
    """What decays, and what does not, of each division over ranks; no empty group."""
    return [
        {"params": some, "weight_decay": decay}
        for alike in _by_mesh(parameters)
        for some, decay in (
            ([p for p in alike if p.ndim >= 2], settings.weight_decay),
            ([p for p in alike if p.ndim < 2], 0.0),
        )
        if some
    ]


def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of all gradients over all ranks; the same number on each."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [nn.utils.get_total_norm(alike) for alike in _by_mesh(gradients)]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))


def _by_mesh(tensors: list[T]) -> list[list[T]]:
    """Those together that are divided over the same ranks: torch takes no others at once."""
    alike: dict[Any, list[T]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(alike.values())


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of global ``norm`` down to ``limit``."""
    if norm > limit:
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / norm)


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every weight is finite, on all ranks; the same answer on each.

    A shard's smallest or largest value is infinite or no number where one of its weights is: one pass over
    the weights without a copy of them, and no sum that could overflow where they are merely large.
    """
    shards = [_local(parameter.detach()) for parameter in parameters]
    bounds = [bound for shard in shards if shard.numel() for bound in torch.aminmax(shard)]
    broken = torch.zeros((), device=shards[0].device)
    if bounds:
        broken += (~torch.isfinite(torch.stack(bounds))).any()
    dist.all_reduce(broken)
    return not broken


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
