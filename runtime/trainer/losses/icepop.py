"""IcePop (ringtech.notion.site/icepop): tokens on which trainer and engine disagree are left out."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import IcepopLoss


def icepop(settings: IcepopLoss, tokens: TrainedTokens) -> TokenLoss:
    """−(π/μ) · A where low ≤ π/μ ≤ high, else 0."""
    ratios = tokens.log_ratios().exp()
    outside = (ratios < settings.low) | (ratios > settings.high)
    return TokenLoss(torch.where(outside, 0.0, -ratios * tokens.advantages), capped=outside)
