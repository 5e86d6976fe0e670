"""One rollout: an environment and the policy, within one time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackrl.runtime.environments.base import (
    AgentEnvironment,
    Environment,
    NoRoom,
    Outcome,
    Task,
    TurnEnvironment,
)
from stackrl.runtime.environments.workers import EnvironmentFailed, InWorkers, WorkerLost
from stackrl.runtime.inference.client import EngineLost
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import Engines, Generate
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.groups import Rollout, rollout_id
from stackrl.runtime.orchestrator.judging import Judge
from stackrl.runtime.orchestrator.policy import Policy
from stackrl.runtime.orchestrator.seats import Asking, Seat
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.schemas import environments as stack_environments
from stackrl.schemas.stack import Stack, settings_of, settings_of_environment
from stackrl.schemas.stages import Stage

LOSSES = 5
"""Engines and workers that a rollout may lose before it counts as failed."""
_JUDGE = Judge()

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from stackrl.runtime.orchestrator.endpoint import EndpointPolicy


class RolloutError(Exception):
    """A rollout without a reward: the environment, the engine or the clock failed. Never a reward of zero."""


@dataclass(frozen=True)
class Limits:
    """How far a rollout may go, and how it is sampled."""

    turn: int
    """Tokens of one answer."""
    sequence: int
    """Tokens of prompts and answers together."""
    seconds: float
    """For environment and engine together."""
    temperature: float
    """0 always takes the likeliest token; only evaluations do."""

    @classmethod
    def of(cls, stack: Stack, stage: Stage, environment: stack_environments.Environment) -> Limits:
        """Those of ``environment`` in ``stage``."""
        sampling = settings_of_environment(settings_of(stack, stage), environment).sampling
        return cls(
            turn=sampling.max_tokens,
            sequence=min(stack.trainer.sequence_length, stack.inference.max_model_length),
            seconds=sampling.timeout,
            temperature=sampling.temperature,
        )


@dataclass(frozen=True)
class Assignment:
    """What is to be rolled out, and where its randomness comes from."""

    group: int
    number: int
    name: str
    """The environment's name in the stack."""
    environment: Environment
    task: Task
    seeds: Seeds


async def roll_out_somewhere(
    what: Assignment, chat: Chat, engines: Engines, limits: Limits, *, at_leisure: bool = False
) -> Rollout:
    """Roll out on whichever engine there is. Where that one is lost, the answer that it was to give is asked
    for elsewhere; where the environment's worker is lost, all begins anew. Waiting takes none of its time.
    ``at_leisure``: nor do answers, which have a limit of their own.

    Raises RolloutError, also where it loses one after another: it may be what they die of. Raises
    OrchestratorError where who answers is not there.
    """
    losses = 0
    while losses < LOSSES:
        place, left = engines.serving(what.group), LOSSES - 1 - losses
        try:
            async with _place(what.environment):
                await _environment_is_ready(what)
                async with place as generate:
                    return await roll_out(what, chat, generate, limits, at_leisure=at_leisure, losses=left)
        except (EngineLost, WorkerLost) as error:
            lost = error
            losses += 1 + (place.losses if isinstance(place, Seat) else 0)
            if isinstance(error, WorkerLost) and not what.environment.begins_anew:
                raise RolloutError(f"{what.name}: {error}") from error
            log.warning("rollout %s begins anew: %s", rollout_id(what.group, what.number), error)
    whom = "engine" if isinstance(lost, EngineLost) else "worker"
    raise RolloutError(f"{what.name}: lost its {whom} {LOSSES} times; {lost}") from lost


def _place(environment: Environment) -> AbstractAsyncContextManager[None]:
    """Of a rollout where it is led; most environments have room for any number."""
    return environment.place() if isinstance(environment, InWorkers) else contextlib.nullcontext()


async def _environment_is_ready(what: Assignment) -> None:
    """Raises RolloutError where the environment has no worker and gets none."""
    if isinstance(what.environment, InWorkers):
        try:
            await what.environment.ready()
        except EnvironmentFailed as error:
            raise RolloutError(f"{what.name}: {error}") from error


async def roll_out(
    what: Assignment,
    chat: Chat,
    generate: Generate,
    limits: Limits,
    *,
    at_leisure: bool = False,
    losses: int = 0,
) -> Rollout:
    """Take ``what`` to its end. ``at_leisure``: answers take none of its time. ``losses``: how many times an
    answer that was lost with its engine is asked for again elsewhere.

    Raises EngineLost, WorkerLost, OrchestratorError where who answers says that the run cannot go on, and
    RolloutError for whatever else goes wrong.
    """
    limit = asyncio.timeout(limits.seconds)
    policy = Policy(what, chat, Asking(generate, limit, at_leisure=at_leisure, losses=losses), limits)
    if at_leisure:
        policy.seconds = None
    led = isinstance(what.environment, AgentEnvironment)
    try:
        async with limit:
            if led:
                outcome = await what.environment.rollout(what.task, policy)
            else:
                outcome = await in_turns(what.environment, what.task, policy)
        return _finished(what, policy, outcome)
    except (EngineLost, WorkerLost, OrchestratorError):
        raise
    except EnvironmentFailed as error:
        raise RolloutError(f"{what.name}: {error}") from error
    except Exception as error:
        if limit.expired():
            raise RolloutError(
                f"{what.name}: over {limits.seconds:g} s (sampling.timeout) when {policy.doing}"
            ) from error
        raise RolloutError(f"{what.name}: {type(error).__name__}: {error}") from error


async def in_turns(environment: TurnEnvironment, task: Task, policy: Policy | EndpointPolicy) -> Outcome:
    """Answer and reply in turns."""
    outcome: Outcome | None = None
    while outcome is None or not outcome.done:
        try:
            await policy.answer(*(outcome.messages if outcome else ()))
        except NoRoom:
            if outcome is None:
                raise
            break
        outcome = await _JUDGE.reply(environment, task, policy.answers)
    return outcome


def _finished(what: Assignment, policy: Policy, outcome: Outcome) -> Rollout:
    """Raises ValueError where a metric is no number: a curriculum would never forget it."""
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name}: {value}")
    return Rollout(
        group=what.group,
        number=what.number,
        environment=what.name,
        reward=worth(outcome, what.environment),
        rewards=dict(outcome.rewards),
        metrics=dict(outcome.metrics),
        turns=len(policy.answers),
        sampled=policy.sampled,
        prefix_breaks=policy.prefix_breaks,
        samples=policy.samples(),
    )


def worth(outcome: Outcome, environment: Environment) -> float:
    """The sum of an outcome's rewards, each times its weight.

    Raises ValueError where that is no number, or where one is missing that the stack gives a weight.
    """
    if not outcome.rewards:
        raise ValueError("the environment gave no reward")
    if missing := set(environment.expected) - outcome.rewards.keys():
        raise ValueError(
            f"`rewards` of the stack weighs {', '.join(sorted(missing))}, and the environment gave "
            f"{', '.join(outcome.rewards)}; a class that gives some rewards only now and then lists all of "
            "them in its `weights`"
        )
    total = math.fsum(
        environment.weights.get(name, 1.0) * float(reward) for name, reward in outcome.rewards.items()
    )
    if not math.isfinite(total):
        raise ValueError(f"reward {dict(outcome.rewards)}")
    return total
