"""Divergence from a fixed reference, estimated on sampled tokens, as part of the loss (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from stackrl.runtime.trainer.losses.tokens import LOG_RATIO_LIMIT, TokenLoss, TrainedTokens
from stackrl.schemas.losses import Divergence


def with_divergence(
    settings: Divergence, loss: Callable[[TrainedTokens], TokenLoss], tokens: TrainedTokens
) -> TokenLoss:
    """``loss`` + coefficient · the estimate of each token."""
    found = loss(tokens)
    divergence = estimate(settings.estimator, tokens.logprobs, tokens.of_reference())
    return replace(found, values=found.values + settings.coefficient * divergence)


def estimate(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Of each token, with d = log π − log π_ref: d, d²/2, or e^(−d) + d − 1 for d of at least −20."""
    differences = logprobs - reference
    if estimator == "k1":
        return differences
    if estimator == "k2":
        return differences.square() / 2
    differences = differences.clamp(min=-LOG_RATIO_LIMIT)
    return (-differences).exp() + differences - 1
