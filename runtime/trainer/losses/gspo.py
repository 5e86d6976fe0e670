"""GSPO (arXiv 2507.18071): the ratio of a whole sequence is clipped."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.clipping import clipped
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import GspoLoss


def gspo(settings: GspoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) with s = exp(mean of log π/μ over the sequence)."""
    ratios = tokens.sequences.mean(tokens.log_ratios()).exp()
    return clipped(ratios, tokens.advantages, low=settings.clip_low, high=settings.clip_high)
