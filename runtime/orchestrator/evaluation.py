"""What the policy does on prompts of the evaluation's own draw: sampled, and with the likeliest tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.progress import Progress
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out_somewhere
from stackrl.runtime.orchestrator.scores import Answered, scores
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.orchestrator.tries import TRIES, seeds_of_try
from stackrl.schemas.environments import Environment

BRANCH = "evaluation"
"""Of the seed tree: training never visits it."""


class EvaluationFailed(Exception):
    """All rollouts of a kind failed. The text tells the last cause."""


async def evaluate(
    environments: Sequence[Environment],
    seed: int,
    chat: Chat,
    engines: Engines,
    limits: Mapping[str, Limits],
    progress: Progress,
    *,
    prompts: int,
    samples: int,
) -> dict[str, float]:
    """Reward, exact match and pass@k at the environment's temperature, and the first two greedily.

    ``limits`` by the environment's name. Every evaluation draws the same ``prompts``, from a branch of the
    seed tree that training never visits. They are other draws of the same tasks: where an environment has
    few, training draws many of them too. Each is answered ``samples`` times, and once greedily. Rollouts
    that failed, as often as their environment's `failures` says, are left out and counted. Raises
    EvaluationFailed where all of one kind did.
    """
    names = ", ".join(environment.name for environment in environments)
    progress.doing(f"waiting for rollouts of an evaluation of {names}")
    tries = {environment.name: TRIES[environment.failures] for environment in environments}
    asking = _Asking(Mix(environments, Seeds(seed).branch(BRANCH)), tries, chat, engines, progress)
    sampled = await asking.all(prompts, samples, limits)
    likeliest = {name: replace(limit, temperature=0.0) for name, limit in limits.items()}
    greedy = [rollout for [rollout] in await asking.all(prompts, 1, likeliest) if rollout is not None]
    answers = [[_answered(rollout) for rollout in those if rollout is not None] for those in sampled]
    return {
        **scores(answers, samples),
        "greedy_reward": fmean(rollout.reward for rollout in greedy),
        "greedy_exact": fmean(_answered(rollout).solved for rollout in greedy),
        "prompts": prompts,
        "samples": samples,
        "failed": prompts * (samples + 1) - sum(map(len, answers)) - len(greedy),
    }


def _answered(rollout: Rollout) -> Answered:
    return Answered(rollout.reward, rollout.metrics.get("solved", 0.0))


class _Asking:
    """Rollouts of the prompts of a mix."""

    def __init__(
        self, mix: Mix, tries: Mapping[str, int], chat: Chat, engines: Engines, progress: Progress
    ) -> None:
        self._mix, self._tries = mix, tries
        self._chat, self._engines, self._progress = chat, engines, progress

    async def all(
        self, prompts: int, samples: int, limits: Mapping[str, Limits]
    ) -> list[list[Rollout | None]]:
        """``samples`` of each prompt; None for one that failed."""
        self._last: RolloutError | None = None
        results = await asyncio.gather(
            *(self._one(number, sample, limits) for number in range(prompts) for sample in range(samples))
        )
        if all(result is None for result in results):
            raise EvaluationFailed(f"all {len(results)} rollouts failed; the last one: {self._last}")
        return [results[first : first + samples] for first in range(0, len(results), samples)]

    async def _one(self, number: int, sample: int, limits: Mapping[str, Limits]) -> Rollout | None:
        draw = self._mix.draw(number)
        own = draw.seeds.branch("sample", sample)
        for number_of_try in range(self._tries[draw.name]):
            seeds = seeds_of_try(own, number_of_try)
            what = Assignment(number, sample, draw.name, draw.environment, draw.task, seeds)
            try:
                rollout = await roll_out_somewhere(what, self._chat, self._engines, limits[draw.name])
            except RolloutError as error:
                self._last = error
            else:
                self._progress.rollout_finished()
                return rollout
        return None
