"""Importance weights of what the engine sampled, per token, sequence or geometric mean. They are constants to
the gradient: REINFORCE under another policy's samples has the weight in front of the gradient, not within."""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.sequences import Sequences
from stackrl.runtime.trainer.losses.tokens import limited
from stackrl.schemas.losses import Correction, Level


def ratios(level: Level, log_ratios: Tensor, sequences: Sequences) -> Tensor:
    """float [N], without gradient, of ``log_ratios`` [N] of tokens.

    `token`: their exp; `sequence`: exp of their sum over the sequence; `geometric`: exp of their mean.
    """
    found = limited(log_ratios.detach())
    if level == "sequence":
        found = limited(sequences.sum(found))
    elif level == "geometric":
        found = sequences.mean(found)
    return found.exp()


def corrected(settings: Correction, log_ratios: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The weight of each token, without gradient, and where it was out of bounds: truncated, or zero."""
    weights = ratios(settings.level, log_ratios, sequences)
    outside = (weights < settings.low) | (weights > settings.high)
    if settings.method == "mask":
        return torch.where(outside, 0.0, weights), outside
    return weights.clamp(settings.low, settings.high), outside
