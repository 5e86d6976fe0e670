"""CISPO (arXiv 2506.13585): REINFORCE with an importance weight that is clipped, not the token."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import CispoLoss


def cispo(settings: CispoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−sg(clip(π/μ, 1 − clip_low, 1 + clip_high)) · A · log π."""
    ratios = tokens.log_ratios().detach().exp()
    weights = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(-weights * tokens.advantages * tokens.logprobs, capped=weights != ratios)
