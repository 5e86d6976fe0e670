"""What a loss sees and what it gives: one entry per trained token, nothing else.

Tokens that are not trained are left out by selection before a loss runs, so whatever stands in their
places (NaN included) reaches neither the loss nor a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp of more than this is no longer a ratio that anything is learnt from, and soon no number."""


@dataclass(frozen=True)
class TrainedTokens:
    """N trained tokens of a micro-batch; every field float [N]."""

    logprobs: Tensor
    """The trainer's, at the sampling temperature; carries the gradient."""
    engine_logprobs: Tensor
    """The engine's, when it sampled the token."""
    advantages: Tensor

    def log_ratios(self) -> Tensor:
        """log π/μ, limited to ±20; carries the gradient within the limits."""
        return (self.logprobs - self.engine_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each of N tokens, to be summed with the weights of the normalisation."""

    values: Tensor
    """float [N], with gradient."""
    capped: Tensor
    """bool [N]: where the ratio was capped, or clipped so that the token has no gradient."""
