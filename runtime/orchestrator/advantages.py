"""Advantages: what one rollout of a group was worth beside the others. One function and one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stackrl.schemas.algorithm import Advantage, GrpoAdvantage

_EPSILON = 1e-6


def grpo(rewards: np.ndarray, settings: GrpoAdvantage) -> np.ndarray:
    """Reward minus the group's mean (arXiv 2503.20783); over the sample deviation if asked (2402.03300).

    ``rewards`` float64 [rollouts of one group, at least 2] → float64 of the same shape. Equal rewards give
    exact zeros: the rounding of their mean must not be blown up by a deviation near zero.
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + _EPSILON) if settings.divide_by_deviation else centred


ADVANTAGES: dict[str, Callable[[np.ndarray, Advantage], np.ndarray]] = {"grpo": grpo}


def advantages(rewards: Sequence[float], settings: Advantage) -> list[float]:
    """The advantage of each rollout of one group, by ``settings.type``."""
    return ADVANTAGES[settings.type](np.asarray(rewards, dtype=np.float64), settings).tolist()


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether there is anything to learn from a group: rewards that are all equal teach nothing."""
    return min(rewards) != max(rewards)
