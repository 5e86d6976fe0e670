"""Divergence from a fixed reference, estimated on sampled tokens, as part of the loss (arXiv 2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from stackrl.runtime.trainer.losses.tokens import LOG_RATIO_LIMIT, TokenLoss, TrainedTokens, half_squares
from stackrl.schemas.losses import Divergence

_STEEPEST = -math.log1p(LOG_RATIO_LIMIT)
"""Where the slope of k3, 1 − e^(−d), is −20. Tokens that older weights sampled lie far below it."""


def with_divergence(
    settings: Divergence, loss: Callable[[TrainedTokens], TokenLoss], tokens: TrainedTokens
) -> TokenLoss:
    """``loss`` + coefficient · the estimate of each token."""
    found = loss(tokens)
    divergence = estimate(settings.estimator, tokens.logprobs, tokens.of_reference())
    return replace(found, values=found.values + settings.coefficient * divergence)


def estimate(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Of each token, with d = log π − log π_ref: d, d²/2, or e^(−d) + d − 1.

    Where the slope of the last two would be steeper than ±20 they go on in a straight line: one token must
    not take the whole step.
    """
    differences = logprobs - reference
    if estimator == "k1":
        return differences
    if estimator == "k2":
        return half_squares(differences)
    near = differences.clamp(min=_STEEPEST)
    return (-near).exp() + near - 1 + LOG_RATIO_LIMIT * (near - differences)
