"""DPPO (arXiv 2602.04879): a trust region of probabilities, not of their ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.moved import movements, without
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import DppoLoss


def dppo(settings: DppoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−keep · (π/μ) · A + squared_log_ratio · (log π/μ)²; left out is what rose by more than `high` where
    A > 0, and what fell by more than `low` elsewhere."""
    movement = movements(tokens)
    distance = movement.abs() if settings.divergence == "tv" else _divergence(tokens)
    left_out = torch.where(
        tokens.advantages > 0,
        (movement > 0) & (distance > settings.high),
        (movement < 0) & (distance > settings.low),
    )
    return without(left_out, tokens, tokens.advantages, settings.squared_log_ratio)


def _divergence(tokens: TrainedTokens) -> Tensor:
    """μ log μ/π + (1 − μ) log (1 − μ)/(1 − π), without gradient; infinite where π is 1 and μ is not."""
    ours, theirs = tokens.logprobs.detach(), tokens.engine_logprobs
    other, others = -torch.expm1(ours), -torch.expm1(theirs)
    shown = theirs.exp() * (theirs - ours)
    return shown + torch.xlogy(others, others) - torch.xlogy(others, other)
