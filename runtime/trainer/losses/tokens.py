"""What a loss sees and what it gives: one entry per trained token, nothing else.

Tokens that are not trained are left out by selection before a loss runs, so whatever stands in their
places (NaN included) reaches neither the loss nor a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stackrl.runtime.trainer.losses.sequences import Sequences

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
    ages: Tensor
    """RL steps between the weights that sampled the token and those that are trained."""
    sequences: Sequences
    """Which tokens belong together."""
    reference: Tensor | None = None
    """The logprobs of a fixed reference or teacher, where there is one."""

    def of_reference(self) -> Tensor:
        """`reference`. Raises ValueError where there is none."""
        if self.reference is None:
            raise ValueError(
                "the loss compares with a reference, whose logprobs neither came with the batch "
                "nor are kept by the trainer"
            )
        return self.reference

    def log_ratios(self) -> Tensor:
        """log π/μ, limited to ±20; carries the gradient within the limits."""
        return limited(self.logprobs - self.engine_logprobs)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each of N tokens, to be summed with the weights of the normalisation.

    A loss of whole sequences gives each token the value of its sequence.
    """

    values: Tensor
    """float [N], with gradient."""
    capped: Tensor | None = None
    """bool [N]: where a ratio was capped, or the token is clipped or left out so that it has no gradient."""


def half_squares(differences: Tensor) -> Tensor:
    """d²/2, which goes on in a straight line beyond ±20: the slope of no token is steeper than that."""
    slopes = limited(differences.detach())
    return slopes * differences - slopes.square() / 2


def limited(log_ratios: Tensor) -> Tensor:
    """Within ±20, beyond which there is no gradient."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
