"""The numbers of one RL step, as metrics.jsonl has them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from stackrl.runtime.orchestrator.groups import FinishedGroup, Rollout


def rl_record(groups: Sequence[FinishedGroup], step: int, dropped: Counter[str]) -> dict[str, Any]:
    """Of the batch of ``groups`` that trains RL step ``step``. Rewards and lengths are over its rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "solved": fmean(rollout.metrics.get("solved", 0.0) for rollout in rollouts),
        "group_signal": fmean(float(group.has_signal) for group in groups),
        **_staleness(rollouts, step),
        "rollouts": len(rollouts),
        "turns": fmean(rollout.turns for rollout in rollouts),
        "tokens_generated": sum(rollout.sampled for rollout in rollouts),
        "prefix_breaks": sum(rollout.prefix_breaks for rollout in rollouts),
        "dropped": dropped.total(),
        **{f"dropped/{reason}": count for reason, count in dropped.items()},
        **_by_environment(rollouts),
    }


def _staleness(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """Trainer steps behind each sampled token: the mean over tokens, and the most."""
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        for sample in rollout.samples:
            for span in sample.spans:
                tokens[step - span.version.step] += span.end - span.start
    return {
        "staleness_mean": sum(age * count for age, count in tokens.items()) / tokens.total(),
        "staleness_max": max(tokens),
    }


def _by_environment(rollouts: Sequence[Rollout]) -> dict[str, float]:
    of: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        of[rollout.environment].append(rollout)
    rewards = {f"reward/{name}": fmean(r.reward for r in those) for name, those in of.items()}
    lengths = {f"length/{name}": fmean(r.sampled for r in those) for name, those in of.items()}
    return rewards | lengths
