"""GRPO's token loss (arXiv 2402.03300): PPO's clipped ratio (1707.06347), against the engine."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.algorithm import GrpoLoss


def grpo(settings: GrpoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = π/μ."""
    ratios = tokens.log_ratios().exp()
    free = ratios * tokens.advantages
    clipped = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return TokenLoss(-torch.minimum(free, clipped), capped=clipped < free)
