"""Learning from a reference or teacher what it would rather have said, on what the policy says itself."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.moved import movements, without
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens, limited
from stackrl.schemas.losses import Distillation


def distillation(settings: Distillation, tokens: TrainedTokens) -> TokenLoss:
    """−keep · sg(log π_ref − log π) · (π/μ) + squared_log_ratio · (log π/μ)².

    On samples of π its gradient is that of the divergence of π from the reference. log π_ref − log π is
    limited to ±20: a token that the reference never says must not take the whole step.
    """
    preferences = limited((tokens.of_reference() - tokens.logprobs).detach())
    return without(movements(tokens) < -settings.limit, tokens, preferences, settings.squared_log_ratio)
