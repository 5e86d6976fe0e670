"""From the groups of a batch to what they teach: shaped, compared, and written on their samples.

What is remembered from step to step (moving means, solve rates) lies in the records of the batches, which
the journal keeps. So it is the same after a restart, goes back with a rollback, and stands in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from stackrl.runtime.orchestrator.advantages import (
    Rewarded,
    advantages,
    own_function,
)
from stackrl.runtime.orchestrator.beside import beside
from stackrl.runtime.orchestrator.curriculum import shares, solve_rates
from stackrl.runtime.orchestrator.errors import BadInput
from stackrl.runtime.orchestrator.groups import FinishedGroup
from stackrl.runtime.orchestrator.shaping import shaped
from stackrl.runtime.transport.messages import CE, REF_KL, RL, Sample
from stackrl.schemas.advantages import compares
from stackrl.schemas.stack import (
    EnvironmentSettings,
    Stack,
    StageSettings,
    environment_settings,
    settings_of,
)
from stackrl.schemas.stages import RlStage

BASELINE, SOLVE_RATE = "baseline/", "solve_rate/"
"""Beginnings of the keys of a record that are remembered; the name of an environment follows."""
LIMIT = 300.0
"""Seconds within which the rollouts of a batch are compared."""
Judgement = TypeVar("Judgement")
_COMPONENTS = {"rl": RL, "ce": CE, "ref_kl": REF_KL}


@dataclass(frozen=True)
class Lesson:
    """What a batch teaches, in the order of its groups, and the numbers to write into its record."""

    samples: list[Sample]
    record: dict[str, float]


class Signals:
    """What groups teach in one stage. Holds nothing that changes."""

    def __init__(self, settings: StageSettings) -> None:
        """Raises BadInput where an advantage of the user is not there."""
        self._algorithm = settings.algorithm
        self._of = environment_settings(settings)
        self._weights = {e.name: e.weight for e in settings.environments}
        functions = [e.advantage for e in self._of.values() if e.advantage.type == "python"]
        for advantage in functions:
            own_function(advantage)
        self._own = " or ".join(dict.fromkeys(advantage.path for advantage in functions))

    async def in_time(self, judgement: Callable[..., Judgement], *arguments: object) -> Judgement:
        """What ``judgement``, one of the methods below, says; the event loop does not wait for it.

        Raises BadInput where it does not come back, as a function of the user may.
        """
        try:
            return await beside(LIMIT, judgement, *arguments)
        except TimeoutError:
            whose = f"the advantage {self._own}" if self._own else "advantages"
            raise BadInput(f"{whose} did not come back within {LIMIT:g} s; make it faster") from None

    def usable(self, group: FinishedGroup) -> bool:
        """Whether enough of the group is left to learn from."""
        settings = self._of[group.plan.environment]
        return len(group.rollouts) >= (2 if _compared(settings) else 1)

    def teaches(self, group: FinishedGroup) -> bool:
        """Whether there is anything to learn from the group, which is usable."""
        settings = self._of[group.plan.environment]
        if not _compared(settings):
            return True
        [values] = advantages([self._rewarded(group)], settings.advantage)
        return bool(values.any())

    def shares(self, before: Mapping[str, Any]) -> dict[str, float] | None:
        """What environments are drawn by after the batch of record ``before``, if not their weights."""
        curriculum = self._algorithm.curriculum
        if curriculum is None:
            return None
        return shares(self._weights, _remembered(before, SOLVE_RATE), curriculum)

    def lesson(self, groups: Sequence[FinishedGroup], before: Mapping[str, Any]) -> Lesson:
        """What the batch of ``groups`` teaches; ``before`` is the record of the batch that came before it."""
        if not groups:
            return Lesson([], {})
        baselines = _remembered(before, BASELINE)
        worth = {group.plan.id: self._rewarded(group) for group in groups}
        values = self._advantages(groups, worth, baselines)
        samples = [
            self._written(sample, advantage, self._of[group.plan.environment])
            for group in groups
            for rollout, advantage in zip(group.rollouts, values[group.plan.id], strict=True)
            for sample in rollout.samples
        ]
        record = self._record(groups, worth, baselines, before)
        return Lesson(samples, {"group_signal": self._signal(groups, values)} | record)

    def _signal(self, groups: Sequence[FinishedGroup], values: Mapping[int, Sequence[float]]) -> float:
        """The share of groups that teach something."""
        return fmean(
            float(not _compared(self._of[group.plan.environment]) or any(values[group.plan.id]))
            for group in groups
        )

    def _rewarded(self, group: FinishedGroup) -> Rewarded:
        """Shaped where the reward is what is learnt from."""
        rewarded = self._of[group.plan.environment].component == "rl"
        return Rewarded(group.rollouts, shaped(group.rollouts, self._algorithm.shaping if rewarded else None))

    def _advantages(
        self, groups: Sequence[FinishedGroup], worth: Mapping[int, Rewarded], baselines: dict[str, float]
    ) -> dict[int, list[float]]:
        """By group. Environments with the same advantage are looked at together."""
        values = {group.plan.id: [0.0] * len(group.rollouts) for group in groups}
        together: dict[str, list[FinishedGroup]] = {}
        for group in groups:
            settings = self._of[group.plan.environment]
            if settings.component == "rl":
                together.setdefault(settings.advantage.model_dump_json(), []).append(group)
        for those in together.values():
            advantage = self._of[those[0].plan.environment].advantage
            found = advantages([worth[group.plan.id] for group in those], advantage, baselines)
            for group, numbers in zip(those, found, strict=True):
                values[group.plan.id] = numbers.tolist()
        return values

    def _written(self, sample: Sample, advantage: float, settings: EnvironmentSettings) -> Sample:
        mark = _COMPONENTS[settings.component]
        mask = np.where(sample.loss_mask > 0, mark, 0).astype("|u1")
        return msgspec.structs.replace(sample, advantage=advantage, loss_mask=mask)

    def _record(
        self,
        groups: Sequence[FinishedGroup],
        worth: Mapping[int, Rewarded],
        baselines: Mapping[str, float],
        before: Mapping[str, Any],
    ) -> dict[str, float]:
        record = {BASELINE + name: value for name, value in baselines.items()}
        if self._algorithm.shaping is not None:
            record["reward_shaped"] = fmean(
                reward for group in groups for reward in worth[group.plan.id].rewards.tolist()
            )
        if self._algorithm.curriculum is not None:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            rates = solve_rates(rollouts, _remembered(before, SOLVE_RATE), self._algorithm.curriculum)
            record |= {SOLVE_RATE + name: rate for name, rate in rates.items()}
        return record


def look_for_own_functions(stack: Stack) -> None:
    """Those that advantages of any stage name. Raises BadInput where one is not there."""
    for stage in stack.stages:
        if isinstance(stage, RlStage):
            Signals(settings_of(stack, stage))


def _compared(settings: EnvironmentSettings) -> bool:
    """Whether the rollouts of a group learn from each other alone."""
    return settings.component == "rl" and compares(settings.advantage)


def _remembered(record: Mapping[str, Any], kind: str) -> dict[str, float]:
    return {key.removeprefix(kind): value for key, value in record.items() if key.startswith(kind)}
