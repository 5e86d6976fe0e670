"""SAPO (arXiv 2511.20347): a sigmoid gate, which lets go of a token as its ratio leaves 1."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import SapoLoss


def sapo(settings: SapoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−(4/τ) · σ(τ(r − 1)) · A with r = π/μ; τ is `positive` where A > 0, else `negative`."""
    sharpness = torch.full_like(tokens.advantages, settings.negative)
    sharpness = sharpness.masked_fill(tokens.advantages > 0, settings.positive)
    gates = torch.sigmoid(sharpness * (tokens.log_ratios().exp() - 1)) * 4 / sharpness
    return TokenLoss(-gates * tokens.advantages)
