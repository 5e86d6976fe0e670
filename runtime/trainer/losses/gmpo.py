"""GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each clipped."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import GmpoLoss


def gmpo(settings: GmpoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−A · exp(mean over the sequence of d), with d = log π/μ at most clip_high where A > 0, and at least
    −clip_low elsewhere."""
    free, rising = tokens.log_ratios(), tokens.advantages > 0
    clipped = torch.where(rising, free.clamp(max=settings.clip_high), free.clamp(min=-settings.clip_low))
    return TokenLoss(-tokens.advantages * tokens.sequences.mean(clipped).exp(), capped=clipped != free)
