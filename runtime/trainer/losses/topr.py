"""TOPR (arXiv 2503.14286): what went well is learnt as it is, what went badly as far as it is still said."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.importance import ratios
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import ToprLoss


def topr(settings: ToprLoss, tokens: TrainedTokens) -> TokenLoss:
    """−A · log π where A ≥ 0, −sg(min(π/μ, 1)) · A · log π where A < 0."""
    of_level = ratios(settings.level, tokens.log_ratios(), tokens.sequences)
    falling = tokens.advantages < 0
    weights = torch.where(falling, of_level.clamp(max=1.0), 1.0)
    return TokenLoss(-weights * tokens.advantages * tokens.logprobs, capped=falling & (of_level > 1))
