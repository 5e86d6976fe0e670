"""Losses that leave out tokens whose probability has moved too far, and hold all of them to the engine's."""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens, half_squares


def movements(tokens: TrainedTokens) -> Tensor:
    """π − μ, without gradient."""
    return tokens.logprobs.detach().exp() - tokens.engine_logprobs.exp()


def without(
    left_out: Tensor, tokens: TrainedTokens, advantages: Tensor, squared_log_ratio: float
) -> TokenLoss:
    """−(π/μ) · A, 0 where ``left_out``, plus squared_log_ratio · (log π/μ)² everywhere (arXiv 2602.02276),
    in a straight line beyond ±20."""
    gains = torch.where(left_out, 0.0, tokens.log_ratios().exp() * advantages)
    distances = 2 * half_squares(tokens.logprobs - tokens.engine_logprobs)
    return TokenLoss(squared_log_ratio * distances - gains, capped=left_out)
