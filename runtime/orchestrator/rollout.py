"""One rollout: an environment and an engine in turns, within one time limit."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from stackrl.runtime.environments.base import Environment, Outcome, Task
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import Conversation
from stackrl.runtime.orchestrator.engines import Generate
from stackrl.runtime.orchestrator.groups import Rollout, rollout_id
from stackrl.runtime.orchestrator.seeds import Seeds, turn_seed


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


async def roll_out(what: Assignment, chat: Chat, generate: Generate, limits: Limits) -> Rollout:
    """Take ``what`` to its end. Raises RolloutError for whatever goes wrong."""
    try:
        async with asyncio.timeout(limits.seconds):
            return await _take_turns(what, chat, generate, limits)
    except TimeoutError as error:
        raise RolloutError(f"{what.name}: over {limits.seconds:g} s (sampling.timeout)") from error
    except Exception as error:
        raise RolloutError(f"{what.name}: {type(error).__name__}: {error}") from error


async def _take_turns(what: Assignment, chat: Chat, generate: Generate, limits: Limits) -> Rollout:
    conversation = Conversation(chat, what.task.messages)
    rollout = rollout_id(what.group, what.number)
    outcome: Outcome | None = None
    while outcome is None or not outcome.done:
        room = min(limits.turn, limits.sequence - len(conversation.prompt))
        if room < 1:
            break
        turn = len(conversation.answers)
        conversation.add_generation(
            await generate(
                conversation.prompt,
                max_tokens=room,
                temperature=limits.temperature,
                seed=turn_seed(what.seeds, turn),
                stop=chat.stop,
                request=f"{rollout}-{turn}",
            )
        )
        outcome = await what.environment.reply(what.task, conversation.answers)
        if not outcome.done:
            conversation.add_message(outcome.message)
    if outcome is None:
        raise ValueError(
            f"the prompt of {len(conversation.prompt)} tokens leaves no room for an answer "
            f"within {limits.sequence}"
        )
    if not math.isfinite(outcome.reward):
        raise ValueError(f"reward {outcome.reward}")
    return Rollout(
        group=what.group,
        number=what.number,
        environment=what.name,
        reward=float(outcome.reward),
        metrics=dict(outcome.metrics),
        turns=len(conversation.answers),
        sampled=conversation.sampled,
        prefix_breaks=conversation.prefix_breaks,
        samples=conversation.samples(rollout, what.group, what.name, limits.temperature),
    )
