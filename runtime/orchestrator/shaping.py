"""What rewards are changed by before the rollouts of a group are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.schemas.advantages import DivergencePenalty, LengthPenalty, Overlong, Shaping

_LIMIT = 20.0
"""Beyond it a token's log-ratio counts as this much, and k3 grows no faster than this with it: a single token
must not decide over a rollout's reward."""


def shaped(rollouts: Sequence[Rollout], shaping: Shaping | None) -> np.ndarray:
    """What the rollouts of one group are worth, float64 [rollouts].

    Raises ValueError where a divergence is asked for and a sample has no reference.
    """
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    if shaping is None or not rollouts:
        return rewards
    result = rewards.copy()
    if shaping.length is not None:
        result -= max(rewards.mean(), 0.0) * _length(rollouts, shaping.length)
    if shaping.overlong is not None:
        result += [overlong(rollout.sampled, shaping.overlong) for rollout in rollouts]
    if shaping.divergence is not None:
        result -= [divergence(rollout, shaping.divergence) for rollout in rollouts]
    return result


def _length(rollouts: Sequence[Rollout], settings: LengthPenalty) -> np.ndarray:
    """The part of the mean reward that each rollout loses, by its lengths beside the group's greatest."""
    sampled = np.array([rollout.sampled for rollout in rollouts], dtype=np.float64)
    read = np.array([sum(len(s.tokens) for s in r.samples) for r in rollouts], dtype=np.float64) - sampled
    turns = np.array([rollout.turns for rollout in rollouts], dtype=np.float64)
    parts = ((settings.sampled, sampled), (settings.read, read), (settings.turns, turns))
    return sum(weight * lengths / max(lengths.max(), 1.0) for weight, lengths in parts)


def overlong(length: int, settings: Overlong) -> float:
    """DAPO's soft punishment (arXiv 2503.14476), from 0 to −penalty."""
    free = settings.limit - settings.buffer
    return -settings.penalty * min(max((length - free) / settings.buffer, 0.0), 1.0)


def divergence(rollout: Rollout, settings: DivergencePenalty) -> float:
    """What the rollout's divergence from the reference costs: an estimate for each sampled token, summed."""
    total = 0.0
    for sample in rollout.samples:
        if sample.reference is None:
            raise ValueError(f"rollout {rollout.id} has no logprobs of a reference")
        sampled = sample.loss_mask > 0
        ratio = (sample.logprobs[sampled].astype(np.float64) - sample.reference[sampled]).clip(
            -_LIMIT, _LIMIT
        )
        match settings.estimator:
            case "k1":
                total += ratio.sum()
            case "k2":
                total += (ratio**2 / 2).sum()
            case "k3":
                near = ratio.clip(-np.log1p(_LIMIT), None)
                total += (np.exp(-near) + near - 1 + _LIMIT * (near - ratio)).sum()
    return settings.weight * float(total)
