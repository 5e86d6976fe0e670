"""Environments as pools of prompts by difficulty: those that are neither solved nor hopeless come more often.

What a prompt is worth to learn from goes with the variance of its success, p (1 − p), which is greatest where
half of the rollouts solve it (arXiv 2502.12272).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.schemas.advantages import Curriculum


def solve_rates(
    rollouts: Sequence[Rollout], before: Mapping[str, float], settings: Curriculum
) -> dict[str, float]:
    """The moving mean of each environment's metric `solved`, after a step with ``rollouts``.

    The first step that has any sets it; environments that do not tell the metric have none.
    """
    told: dict[str, list[float]] = {}
    for rollout in rollouts:
        if "solved" in rollout.metrics:
            told.setdefault(rollout.environment, []).append(rollout.metrics["solved"])
    rates = dict(before)
    for name, solved in told.items():
        now = fmean(solved)
        rates[name] = settings.decay * rates[name] + (1 - settings.decay) * now if name in rates else now
    return rates


def shares(
    weights: Mapping[str, float], rates: Mapping[str, float], settings: Curriculum
) -> dict[str, float]:
    """What each environment is drawn in proportion to: its weight, less where it is solved always or never.

    One of which nothing is known keeps its whole weight.
    """
    return {
        name: weight * max(settings.floor, 4 * rates[name] * (1 - rates[name])) if name in rates else weight
        for name, weight in weights.items()
    }
