"""One rollout: an environment and an engine in turns, within one time limit."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from stackrl.runtime.environments.base import Environment, NoRoom, Outcome, Task
from stackrl.runtime.inference.client import EngineLost
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import Conversation
from stackrl.runtime.orchestrator.engines import Engines, Generate
from stackrl.runtime.orchestrator.groups import Rollout, rollout_id
from stackrl.runtime.orchestrator.judging import Judge
from stackrl.runtime.orchestrator.seeds import Seeds, turn_seed
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import Stage

LOSSES = 5
"""Engines that a rollout may lose before it counts as failed."""
_JUDGE = Judge()

log = logging.getLogger(__name__)


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
    def of(cls, stack: Stack, stage: Stage) -> Limits:
        """Those of training in ``stage``."""
        sampling = settings_of(stack, stage).sampling
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


async def roll_out_somewhere(what: Assignment, chat: Chat, engines: Engines, limits: Limits) -> Rollout:
    """Roll out on whichever engine there is, anew where that one is lost; waiting takes none of its time.

    Raises RolloutError, also where it loses one engine after another: it may be what they die of.
    """
    for _ in range(LOSSES):
        try:
            async with engines.serving(what.group) as generate:
                return await roll_out(what, chat, generate, limits)
        except EngineLost as error:
            lost = error
            log.warning("rollout %s begins anew: %s", rollout_id(what.group, what.number), error)
    raise RolloutError(f"{what.name}: lost its engine {LOSSES} times; {lost}") from lost


async def roll_out(what: Assignment, chat: Chat, generate: Generate, limits: Limits) -> Rollout:
    """Take ``what`` to its end. Raises EngineLost, and RolloutError for whatever else goes wrong."""
    taking = _Turns(what, chat, generate, limits)
    try:
        async with asyncio.timeout(limits.seconds) as limit:
            return await taking.to_the_end()
    except EngineLost:
        raise
    except Exception as error:
        if limit.expired():
            raise RolloutError(
                f"{what.name}: over {limits.seconds:g} s (sampling.timeout) when {taking.doing}"
            ) from error
        raise RolloutError(f"{what.name}: {type(error).__name__}: {error}") from error


class _Turns:
    """Answer and reply in turns; ``doing`` says what is waited for."""

    def __init__(self, what: Assignment, chat: Chat, generate: Generate, limits: Limits) -> None:
        self._what, self._chat, self._generate, self._limits = what, chat, generate, limits
        self.doing = "nothing had begun"

    async def to_the_end(self) -> Rollout:
        conversation = Conversation(self._chat, self._what.task.messages)
        outcome: Outcome | None = None
        while outcome is None or not outcome.done:
            try:
                await self._answer(conversation)
            except NoRoom:
                if outcome is None:
                    raise
                break
            outcome = await self._judge(conversation)
            if not outcome.done:
                conversation.add_messages(outcome.messages)
        return self._finished(conversation, outcome)

    async def _answer(self, conversation: Conversation) -> None:
        what, turn, limits = self._what, len(conversation.answers), self._limits
        room = min(limits.turn, limits.sequence - len(conversation.prompt))
        if room < 1:
            raise NoRoom(
                f"the prompt of {len(conversation.prompt)} tokens leaves no room for an answer "
                f"within {limits.sequence}"
            )
        self.doing = f"the engine was to give answer {turn + 1}"
        generation = await self._generate(
            conversation.prompt,
            max_tokens=room,
            temperature=limits.temperature,
            seed=turn_seed(what.seeds, turn),
            stop=self._chat.stop,
            request=f"{rollout_id(what.group, what.number)}-{turn}",
            routes_from=conversation.routed,
        )
        conversation.add_generation(generation)

    async def _judge(self, conversation: Conversation) -> Outcome:
        self.doing = f"the environment was to judge answer {len(conversation.answers)}"
        return await _JUDGE.reply(self._what.environment, self._what.task, conversation.answers)

    def _finished(self, conversation: Conversation, outcome: Outcome) -> Rollout:
        what = self._what
        return Rollout(
            group=what.group,
            number=what.number,
            environment=what.name,
            reward=worth(outcome, what.environment),
            rewards=dict(outcome.rewards),
            metrics=dict(outcome.metrics),
            turns=len(conversation.answers),
            sampled=conversation.sampled,
            prefix_breaks=conversation.prefix_breaks,
            samples=conversation.samples(
                rollout_id(what.group, what.number), what.group, what.name, self._limits.temperature
            ),
        )


def worth(outcome: Outcome, environment: Environment) -> float:
    """The sum of an outcome's rewards, each times its weight. Raises ValueError where that is no number."""
    if not outcome.rewards:
        raise ValueError("the environment gave no reward")
    total = math.fsum(
        environment.weights.get(name, 1.0) * float(reward) for name, reward in outcome.rewards.items()
    )
    if not math.isfinite(total):
        raise ValueError(f"reward {dict(outcome.rewards)}")
    return total
