"""Decoupled PPO (arXiv 2110.00641, 2505.24298): kept near to a recent policy, weighted for what sampled.

A batch is one optimizer step, so the policy before the step is π itself as a constant: to recompute it takes
nothing. Its approximation (A-3PO, 2512.06547) lies between μ and π, the nearer to π the older the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.clipping import clipped
from stackrl.runtime.trainer.losses.importance import corrected
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens, limited
from stackrl.schemas.losses import DecoupledPpoLoss


def decoupled_ppo(settings: DecoupledPpoLoss, tokens: TrainedTokens) -> TokenLoss:
    """−sg(w) · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = π/π_prox and w = `correction` of
    π_prox/μ."""
    proximal = tokens.logprobs.detach()
    if settings.proximal == "approximated":
        proximal = proximal + _share(tokens.ages) * (tokens.engine_logprobs - proximal)
    ratios = limited(tokens.logprobs - proximal).exp()
    loss = clipped(ratios, tokens.advantages, low=settings.clip_low, high=settings.clip_high)
    weights, outside = corrected(settings.correction, proximal - tokens.engine_logprobs, tokens.sequences)
    return TokenLoss(weights * loss.values, capped=loss.capped | outside)


def _share(ages: Tensor) -> Tensor:
    """How much of μ there is in the approximation: 1/n after n steps, nothing in a token of this step."""
    return torch.where(ages > 0, 1 / ages.clamp(min=1), 0.0)
