"""AIPO (arXiv 2505.24034): REINFORCE with a one-sided, capped importance weight."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import AipoLoss


def aipo(settings: AipoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−sg(min(π/μ, ratio_cap)) · A · log π. The weight is a constant to the gradient."""
    ratios = tokens.log_ratios().detach().exp()
    weights = ratios.clamp(max=settings.ratio_cap)
    return TokenLoss(-weights * tokens.advantages * tokens.logprobs, capped=ratios > settings.ratio_cap)
