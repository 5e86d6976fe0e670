"""The mask of a probability that has moved in either direction, whatever the advantage says."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.moved import movements, without
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import IpoLoss


def ipo(settings: IpoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−keep · (π/μ) · A + squared_log_ratio · (log π/μ)², left out where |π − μ| > limit."""
    left_out = movements(tokens).abs() > settings.limit
    return without(left_out, tokens, tokens.advantages, settings.squared_log_ratio)
