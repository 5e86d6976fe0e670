"""PPO's clipped objective (arXiv 1707.06347), with dual clip (1912.09729), which some losses are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.tokens import TokenLoss


def clipped(
    ratios: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> TokenLoss:
    """−min(r·A, clip(r, 1 − low, 1 + high)·A), at most −dual·A where A < 0."""
    free = ratios * advantages
    within = ratios.clamp(1 - low, 1 + high) * advantages
    objective, capped = torch.minimum(free, within), within < free
    if dual is not None:
        least = torch.where(advantages < 0, dual * advantages, -torch.inf)
        objective, capped = torch.maximum(objective, least), capped | (least > objective)
    return TokenLoss(-objective, capped)
