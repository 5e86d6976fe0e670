"""A group: the rollouts of one prompt. It carries its own size, so nothing is ever sliced by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stackrl.runtime.orchestrator.advantages import advantages, has_signal
from stackrl.runtime.transport.messages import Group, Sample
from stackrl.schemas.algorithm import Advantage

SMALLEST_GROUP = 2
"""Fewer rollouts have no mean to be compared with."""


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
    def usable(self) -> bool:
        return len(self.rollouts) >= SMALLEST_GROUP

    @property
    def has_signal(self) -> bool:
        return has_signal(self.rewards)

    @property
    def oldest_step(self) -> int:
        """The oldest RL step among the sampled tokens."""
        return min(sample.oldest().step for rollout in self.rollouts for sample in rollout.samples)

    def message(self, settings: Advantage) -> Group:
        """The group with its advantages."""
        samples = [
            msgspec.structs.replace(sample, advantage=advantage)
            for rollout, advantage in zip(self.rollouts, advantages(self.rewards, settings), strict=True)
            for sample in rollout.samples
        ]
        return Group(
            id=self.plan.id,
            environment=self.plan.environment,
            planned=self.plan.size,
            rollouts=[rollout.id for rollout in self.rollouts],
            rewards=self.rewards,
            samples=samples,
        )


def training_samples(groups: Sequence[FinishedGroup], settings: Advantage) -> list[Sample]:
    """What ``groups`` teach, in their order: by id, and within each by number, in every life of a batch."""
    return [sample for group in groups for sample in group.message(settings).samples]
