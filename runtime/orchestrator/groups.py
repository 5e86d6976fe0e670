"""A group: the rollouts of one prompt. It carries its own size, so nothing is ever sliced by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stackrl.runtime.transport.messages import Sample


@dataclass(frozen=True)
class Plan:
    """A group before it runs: prompt ``number`` of ``stage``, to be rolled out ``size`` times."""

    id: int
    """Counts the groups of the run."""
    stage: str
    number: int
    """Counts the prompts of the stage; with the stage's name it picks environment and task."""
    environment: str
    admitted: int
    """The RL step that the engines held."""
    size: int


class Rollout(msgspec.Struct, kw_only=True):
    """One finished rollout: what it was worth and its training sequences, advantages not yet set."""

    group: int
    number: int
    environment: str
    reward: float
    """What it was worth: its rewards, weighted and summed."""
    metrics: dict[str, float]
    turns: int
    sampled: int
    """Tokens that the engine sampled."""
    prefix_breaks: int
    samples: list[Sample]
    rewards: dict[str, float] = {}
    """By name, without their weights."""

    @property
    def id(self) -> str:
        return rollout_id(self.group, self.number)


def rollout_id(group: int, number: int) -> str:
    return f"{group}-{number}"


@dataclass(frozen=True)
class FinishedGroup:
    """A group none of whose rollouts is still running; failed ones are missing from ``rollouts``."""

    plan: Plan
    rollouts: Sequence[Rollout]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ."""
        return has_signal(self.rewards)

    @property
    def oldest_step(self) -> int:
        """The oldest RL step among the sampled tokens."""
        return min(sample.oldest().step for rollout in self.rollouts for sample in rollout.samples)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a comparison of ``rewards`` tells anything: it does not where all of them are equal."""
    return len(rewards) > 0 and min(rewards) != max(rewards)
