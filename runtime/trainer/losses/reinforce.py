"""REINFORCE, with an importance weight where one is asked for; RLOO (arXiv 2402.14740) with its advantage."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.importance import corrected
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import ReinforceLoss


def reinforce(settings: ReinforceLoss, tokens: TrainedTokens) -> TokenLoss:
    """−sg(w) · A · log π, with w = 1 or `correction` of π/μ."""
    values = -tokens.advantages * tokens.logprobs
    if settings.correction is None:
        return TokenLoss(values)
    weights, outside = corrected(settings.correction, tokens.log_ratios(), tokens.sequences)
    return TokenLoss(weights * values, capped=outside)
