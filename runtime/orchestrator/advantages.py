"""Advantages: what each rollout was worth beside others. One function and one line each."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from stackrl.runtime.orchestrator.errors import BadInput
from stackrl.runtime.orchestrator.groups import Rollout, has_signal
from stackrl.runtime.own_code import OwnCodeError, load_function
from stackrl.schemas.advantages import (
    Advantage,
    GrpoAdvantage,
    HierarchicalAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    PythonAdvantage,
    RaeAdvantage,
    ReinforcePlusPlusAdvantage,
)

_EPSILON = 1e-6
ENTRY_POINTS = "stackrl.advantages"
"""Group of entry points that installed packages offer advantages under."""


@dataclass(frozen=True)
class Rewarded:
    """The rollouts of one group and what each is worth: ``rewards`` float64 [rollouts], shaped."""

    rollouts: Sequence[Rollout]
    rewards: np.ndarray


Baselines = MutableMapping[str, float]
"""Moving means by the environment's name, or `environment/agent`; an advantage may move them on."""
InGroup = Callable[[Rewarded, Advantage], np.ndarray]
Overall = Callable[[Sequence[Rewarded], Advantage, Baselines], list[np.ndarray]]


def grpo(group: Rewarded, settings: GrpoAdvantage) -> np.ndarray:
    """Reward minus the group's mean (arXiv 2503.20783); over the sample deviation if asked (2402.03300)."""
    centred = group.rewards - group.rewards.mean()
    return centred / (group.rewards.std(ddof=1) + _EPSILON) if settings.divide_by_deviation else centred


def leave_one_out(group: Rewarded, settings: LeaveOneOutAdvantage) -> np.ndarray:
    """Reward minus the mean of the others (arXiv 2402.14740), which is G/(G − 1) times the centred reward."""
    size = len(group.rewards)
    return (group.rewards - group.rewards.mean()) * (size / (size - 1))


def max_rl(group: Rewarded, settings: MaxRlAdvantage) -> np.ndarray:
    """Centred reward over the group's mean (arXiv 2602.02710); zero where that is not above zero, or no more
    than what is left of rewards that cancel each other out."""
    mean, most = group.rewards.mean(), np.abs(group.rewards).max()
    return (group.rewards - mean) / mean if mean > _EPSILON * most else np.zeros_like(group.rewards)


def hierarchical(group: Rewarded, settings: HierarchicalAdvantage) -> np.ndarray:
    """Reward minus the mean of the same agent's in the group, or in the episode for agents that say so.

    Who has nobody to be compared with gets zero.
    """
    peers: dict[tuple[float, ...], list[int]] = {}
    for place, rollout in enumerate(group.rollouts):
        agent = rollout.metrics.get("agent", 0.0)
        episode = rollout.metrics.get("episode", 0.0)
        key = (agent, episode) if agent in settings.within_episode else (agent,)
        peers.setdefault(key, []).append(place)
    result = np.zeros_like(group.rewards)
    for places in peers.values():
        those = group.rewards[places]
        result[places] = those - those.mean() if has_signal(those) else 0.0
    return result


def own(group: Rewarded, settings: PythonAdvantage) -> np.ndarray:
    """What the user's function says. Raises BadInput where that is not a finite number for each rollout."""
    try:
        rollouts = tuple(group.rollouts)  # in an order that it cannot change
        said = own_function(settings)(group.rewards.copy(), rollouts, **settings.arguments)
        result = np.asarray(said, dtype=np.float64)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"the advantage {settings.path} failed: {type(error).__name__}: {error}") from error
    if result.shape != group.rewards.shape or not np.isfinite(result).all():
        raise BadInput(
            f"the advantage {settings.path} gave {said!r:.200} for {len(group.rewards)} rewards; "
            "it must give one finite number for each"
        )
    return result


def own_function(settings: PythonAdvantage) -> Callable:
    """The user's function. Raises BadInput where there is none."""
    try:
        return load_function(settings.path, ENTRY_POINTS)
    except OwnCodeError as error:
        raise BadInput(f"algorithm.advantage.path: {error}") from error


def reinforce_plus_plus(
    groups: Sequence[Rewarded], settings: ReinforcePlusPlusAdvantage, baselines: Baselines
) -> list[np.ndarray]:
    """Reward minus a mean, over the standard deviation of all rollouts (arXiv 2501.03262).

    With the groups' means nothing is left of the batch's mean, and rollouts of groups without a signal stay
    at exactly zero.
    """
    if settings.baseline == "group":
        centred = [_centred(group.rewards) for group in groups]
    else:
        everything = np.concatenate([group.rewards for group in groups])
        mean = everything.mean() if has_signal(everything) else everything[0]
        centred = [group.rewards - mean for group in groups]
    deviation = np.concatenate(centred).std()
    return [part / (deviation + _EPSILON) for part in centred]


def rae(groups: Sequence[Rewarded], settings: RaeAdvantage, baselines: Baselines) -> list[np.ndarray]:
    """Reward minus a moving mean that it moves on afterwards, rollout by rollout (arXiv 2506.24119)."""
    result = []
    for group in groups:
        values = []
        for rollout, reward in zip(group.rollouts, group.rewards.tolist(), strict=True):
            name = rollout.environment
            if "agent" in rollout.metrics:
                name = f"{name}/{rollout.metrics['agent']:g}"
            before = baselines.get(name, 0.0)
            values.append(reward - before)
            baselines[name] = settings.decay * before + (1 - settings.decay) * reward
        result.append(np.array(values))
    return result


IN_GROUP: dict[str, InGroup] = {
    "grpo": grpo,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "hierarchical": hierarchical,
    "python": own,
}
"""Advantages that compare the rollouts of a group, and are zero where their rewards are equal."""
OVERALL: dict[str, Overall] = {"reinforce_plus_plus": reinforce_plus_plus, "rae": rae}
"""Those that look at all groups of a step at once, or at what came before."""


def advantages(
    groups: Sequence[Rewarded], settings: Advantage, baselines: Baselines | None = None
) -> list[np.ndarray]:
    """The advantages of the rollouts of each group, float64, by ``settings.type``.

    ``groups`` are all those of a step that ``settings`` hold for, in the order of the batch. Equal rewards
    give exact zeros where a group is compared with itself: the rounding of their mean must not be blown up by
    a deviation near zero.
    """
    if not groups:
        return []
    if settings.type in OVERALL:
        return OVERALL[settings.type](groups, settings, {} if baselines is None else baselines)
    function = IN_GROUP[settings.type]
    return [
        function(group, settings) if has_signal(group.rewards) else np.zeros_like(group.rewards)
        for group in groups
    ]


def _centred(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)
