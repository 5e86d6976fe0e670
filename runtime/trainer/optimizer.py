"""AdamW, its rate as a function of the step, and clipping that is right under sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stackrl.schemas.optimizers import AdamW


def make_optimizer(model: nn.Module, settings: AdamW) -> torch.optim.AdamW:
    """A fresh optimizer; vectors (norms and biases) do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )


def rate(step: int, settings: AdamW, total_steps: int) -> float:
    """The learning rate of ``step``, counted from 0 within a stage of ``total_steps``."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    match settings.decay:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * (settings.final_rate + (1.0 - settings.final_rate) * left)


def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of all gradients over all ranks; the same number on each."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients of global ``norm`` down to ``limit``."""
    if norm > limit:
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / norm)


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every weight is finite, on all ranks; the same answer on each.

    A shard's largest absolute value is infinite or no number where one of its weights is: one pass over the
    weights without a copy of them, and no sum that could overflow where they are merely large.
    """
    shards = [_local(parameter.detach()) for parameter in parameters]
    largest = torch._foreach_norm([shard for shard in shards if shard.numel()], math.inf)
    broken = torch.zeros((), device=shards[0].device)
    if largest:
        broken += (~torch.isfinite(torch.stack(largest))).any()
    dist.all_reduce(broken)
    return not broken


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
