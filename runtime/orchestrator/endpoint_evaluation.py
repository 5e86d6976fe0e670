"""An evaluation of a model behind an endpoint: the environments of a stack, and nothing else of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stackrl.runtime.environments.base import AgentEnvironment, Outcome
from stackrl.runtime.environments.workers import InWorkers, close_workers
from stackrl.runtime.orchestrator.endpoint import Endpoint, EndpointPolicy
from stackrl.runtime.orchestrator.evaluation import BRANCH
from stackrl.runtime.orchestrator.rollout import Limits, in_turns, worth
from stackrl.runtime.orchestrator.scores import Answered, scores
from stackrl.runtime.orchestrator.seeds import Seeds, turn_seed
from stackrl.runtime.orchestrator.tasks import Draw, Mix
from stackrl.schemas.environments import Environment
from stackrl.schemas.stack import Stack

Progress = Callable[[str, int, int], None]
"""Takes an environment's name, and how many of how many answers are there."""


@dataclass(frozen=True)
class Plan:
    """How many prompts, how many answers to each, and how many at once. ``greedy``: the likeliest ones."""

    prompts: int
    samples: int
    requests: int
    greedy: bool = False


class EvaluationFailed(Exception):
    """Environments of which every answer failed. The text names them and says why."""

    def __init__(self, why: str, found: Mapping[str, Mapping[str, float]]) -> None:
        """``found``: the scores of the others."""
        super().__init__(why)
        self.found = found


def environments_of(stack: Stack) -> list[Environment]:
    """What is evaluated: the held-out environments, else those that are learnt."""
    if stack.evaluate is not None and stack.evaluate.environments:
        return stack.evaluate.environments
    return stack.stages[-1].environments or stack.environments


async def evaluate_endpoint(
    stack: Stack, endpoint: Endpoint, plan: Plan, progress: Progress
) -> dict[str, dict[str, float]]:
    """Environment → its scores, with `prompts`, `samples`, `failed` and `tokens` (written, for each answer).

    The prompts are those of a run's own evaluations. Raises EnvironmentRefused before anything is asked, and,
    when all have been, EvaluationFailed where all answers of an environment failed.
    """
    evaluations = [_Evaluation(stack, environment, endpoint, plan) for environment in environments_of(stack)]
    found: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    try:
        for evaluation in evaluations:
            try:
                found[evaluation.name] = await evaluation.made(progress)
            except _AllFailed as error:
                failures.append(str(error))
    finally:
        await close_workers()
    if failures:
        raise EvaluationFailed("\n".join(failures), found)
    return found


class _AllFailed(Exception):
    """Every answer did. The text says why the last one."""


class _Evaluation:
    """That of one environment."""

    def __init__(self, stack: Stack, environment: Environment, endpoint: Endpoint, plan: Plan) -> None:
        self.name, self._endpoint, self._plan = environment.name, endpoint, plan
        self._mix = Mix([environment], Seeds(stack.seed).branch(BRANCH))
        self._limits = Limits.of(stack, stack.stages[-1], environment)
        self._at_once = asyncio.Semaphore(plan.requests)
        self._done = self._tokens = 0
        self._last: Exception | None = None

    async def made(self, progress: Progress) -> dict[str, float]:
        prompts, samples = self._plan.prompts, self._plan.samples
        results = await asyncio.gather(
            *(self._one(prompt, sample, progress) for prompt in range(prompts) for sample in range(samples))
        )
        finished = [result for result in results if result is not None]
        if not finished:
            why = f"{type(self._last).__name__}: {self._last}".rstrip(": ")
            raise _AllFailed(f"{self.name}: all {len(results)} answers failed; the last: {why}")
        answers = [
            [result for result in results[first : first + samples] if result is not None]
            for first in range(0, len(results), samples)
        ]
        return {
            **scores(answers, samples),
            "prompts": prompts,
            "samples": samples,
            "failed": len(results) - len(finished),
            "tokens": self._tokens / len(finished),
        }

    async def _one(self, prompt: int, sample: int, progress: Progress) -> Answered | None:
        """One answer to a prompt; None where it failed."""
        async with self._at_once:
            draw = self._mix.draw(prompt)
            policy = EndpointPolicy(
                self._endpoint, draw.task, draw.environment.tools, self._sampling(draw, sample)
            )
            policy.seconds = self._limits.seconds
            limit: asyncio.Timeout | None = None
            try:
                if isinstance(draw.environment, InWorkers):
                    await draw.environment.ready()
                async with asyncio.timeout(self._limits.seconds) as limit:
                    outcome = await self._led(draw, policy)
                reward = worth(outcome, draw.environment)
                self._tokens += policy.tokens
                return Answered(reward, outcome.metrics.get("solved", 0.0))
            except Exception as error:
                slow = TimeoutError(f"over {self._limits.seconds:g} s (sampling.timeout) when {policy.doing}")
                self._last = slow if limit is not None and limit.expired() else error
                return None
            finally:
                self._done += 1
                progress(self.name, self._done, self._plan.prompts * self._plan.samples)

    async def _led(self, draw: Draw, policy: EndpointPolicy) -> Outcome:
        if isinstance(draw.environment, AgentEnvironment):
            return await draw.environment.rollout(draw.task, policy)
        return await in_turns(draw.environment, draw.task, policy)

    def _sampling(self, draw: Draw, sample: int) -> dict[str, Any]:
        return {
            "temperature": 0.0 if self._plan.greedy else self._limits.temperature,
            "max_tokens": self._limits.turn,
            "seed": turn_seed(draw.seeds.branch("sample", sample), 0) % (1 << 31),
        }
