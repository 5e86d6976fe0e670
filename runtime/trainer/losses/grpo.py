"""GRPO's token loss (arXiv 2402.03300): PPO's clipped ratio, against the engine.

DAPO (2503.14476) and Dr. GRPO (2503.20783) differ in defaults alone: how far is clipped, and what the sum
over tokens is divided by.
"""

from __future__ import annotations

from stackrl.runtime.trainer.losses.clipping import clipped
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import DapoLoss, DrGrpoLoss, GrpoLoss


def grpo(settings: GrpoLoss | DapoLoss | DrGrpoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = π/μ; at most −dual_clip·A where A < 0."""
    return clipped(
        tokens.log_ratios().exp(),
        tokens.advantages,
        low=settings.clip_low,
        high=settings.clip_high,
        dual=settings.dual_clip,
    )
