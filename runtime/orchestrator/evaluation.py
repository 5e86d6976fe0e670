"""What the policy does on prompts of the evaluation's own draw: sampled, and with the likeliest tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.progress import Progress
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out_somewhere
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.schemas.environments import Environment

PROMPTS = 256


async def evaluate(
    environments: Sequence[Environment],
    seed: int,
    chat: Chat,
    engines: Engines,
    limits: Limits,
    progress: Progress,
) -> dict[str, float]:
    """Reward and exact match at the stage's temperature and greedily, over the same prompts.

    Every evaluation draws the same prompts, from a branch of the seed tree that training never visits. They
    are other draws of the same tasks: where an environment has few, training draws many of them too.
    Failed rollouts are left out and counted. Raises OrchestratorError where all of one kind failed.
    """
    mix = Mix(environments, Seeds(seed).branch("evaluation"))
    progress.doing(f"waiting for rollouts of an evaluation of {', '.join(e.name for e in environments)}")
    sampled = await _roll_out_all(mix, chat, engines, limits, progress)
    greedy = await _roll_out_all(mix, chat, engines, replace(limits, temperature=0.0), progress)
    return {
        "reward": fmean(rollout.reward for rollout in sampled),
        "exact": fmean(rollout.metrics.get("solved", 0.0) for rollout in sampled),
        "greedy_reward": fmean(rollout.reward for rollout in greedy),
        "greedy_exact": fmean(rollout.metrics.get("solved", 0.0) for rollout in greedy),
        "prompts": PROMPTS,
        "failed": 2 * PROMPTS - len(sampled) - len(greedy),
    }


async def _roll_out_all(
    mix: Mix, chat: Chat, engines: Engines, limits: Limits, progress: Progress
) -> list[Rollout]:
    results = await asyncio.gather(
        *(_roll_out_one(mix, number, chat, engines, limits, progress) for number in range(PROMPTS))
    )
    finished = [result for result in results if isinstance(result, Rollout)]
    if not finished:
        raise OrchestratorError(
            f"all {PROMPTS} rollouts of an evaluation failed; the last one: {results[-1]}"
        )
    return finished


async def _roll_out_one(
    mix: Mix, number: int, chat: Chat, engines: Engines, limits: Limits, progress: Progress
) -> Rollout | RolloutError:
    draw = mix.draw(number)
    what = Assignment(number, 0, draw.name, draw.environment, draw.task, draw.seeds.branch("sample", 0))
    try:
        rollout = await roll_out_somewhere(what, chat, engines, limits)
    except RolloutError as error:
        return error
    progress.rollout_finished()
    return rollout
