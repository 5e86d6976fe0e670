"""The model in one rollout: it is asked, and what it answers is kept token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stackrl.runtime.environments.base import Answer, Message, NoRoom, Tool, assistant
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import Conversation
from stackrl.runtime.orchestrator.engines import Generate
from stackrl.runtime.orchestrator.groups import rollout_id
from stackrl.runtime.orchestrator.seeds import turn_seed
from stackrl.runtime.transport.messages import Sample

if TYPE_CHECKING:
    from stackrl.runtime.orchestrator.rollout import Assignment, Limits


class Policy:
    """As environments know it (base.Policy), and as their workers do (workers.worker.WholePolicy).

    It answers to one question at a time. ``doing`` says what is waited for.
    """

    def __init__(self, what: Assignment, chat: Chat, generate: Generate, limits: Limits) -> None:
        self._what, self._chat, self._generate, self._limits = what, chat, generate, limits
        self._conversations: list[Conversation] = []
        self._tools: list[Sequence[Tool]] = []
        """Of each conversation."""
        self._answers: list[tuple[int, int]] = []
        """Of each answer: its conversation, and its place in there."""
        self._kept: Collection[int] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._full: set[int] = set()
        """Conversations in which there is no room left for an answer."""
        self.doing = "nothing had begun"
        self.seconds: float | None = limits.seconds
        """That the rollout may take; None where its time stands still during answers."""

    @property
    def answers(self) -> list[Answer]:
        """All so far."""
        return [self.said(number) for number in range(len(self._answers))]

    @property
    def sampled(self) -> int:
        """Tokens that the engine sampled."""
        return sum(conversation.sampled for conversation in self._conversations)

    @property
    def prefix_breaks(self) -> int:
        """Times that a conversation went on from something other than its tokens."""
        inside = sum(conversation.prefix_breaks for conversation in self._conversations)
        return inside + max(len(self._conversations) - 1, 0)

    async def answer(self, *messages: Message) -> Answer:
        """As base.Policy.answer."""
        async with self._one_at_a_time:
            if not self._conversations:
                self._begin([*self._what.task.messages, *messages], self._what.environment.tools)
            else:
                self._go_on(0, messages)
            return self.said(await self._ask(0))

    async def complete(self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """As WholePolicy.complete: a history that goes on from the last answer of a conversation extends its
        tokens, any other one begins a conversation."""
        async with self._one_at_a_time:
            told = [as_tool(tool) for tool in tools]
            last = max((place for place, item in enumerate(history) if "answer" in item), default=None)
            if last is not None:
                conversation, place = self._answers[history[last]["answer"]]
                at_end = place == len(self._conversations[conversation].answers) - 1
                if at_end and self._tools[conversation] == told:
                    self._go_on(conversation, history[last + 1 :])
                    return await self._ask(conversation)
            return await self._ask(self._begin([self._message(item) for item in history], told))

    def said(self, number: int) -> Answer:
        """The answer of that number. Raises KeyError where there is none."""
        if not 0 <= number < len(self._answers):
            raise KeyError(f"there is no answer {number}")
        conversation, place = self._answers[number]
        return self._conversations[conversation].answers[place]

    def keep(self, numbers: Collection[int]) -> None:
        """Train these answers alone. A conversation with others in it is not trained, as it goes on from
        them."""
        self._kept = numbers

    def samples(self) -> list[Sample]:
        """The training sequences. Raises ValueError where there are none."""
        what = self._what
        given_up = {
            conversation
            for number, (conversation, _) in enumerate(self._answers)
            if self._kept is not None and number not in self._kept
        }
        name = rollout_id(what.group, what.number)
        samples = [
            sample
            for index, conversation in enumerate(self._conversations)
            if index not in given_up
            for sample in conversation.samples(name, what.group, what.name, self._limits.temperature)
        ]
        if not samples:
            raise ValueError("the environment judged no whole conversation, so nothing can be trained")
        return samples

    def _begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        self._conversations.append(Conversation(self._chat, messages, tools))
        self._tools.append(tools)
        return len(self._conversations) - 1

    def _go_on(self, conversation: int, messages: Sequence[Message]) -> None:
        if conversation in self._full:
            raise NoRoom("there was no room for the answer before")
        if not messages:
            raise ValueError("the policy was asked again without a message for it")
        self._conversations[conversation].add_messages(messages)

    def _message(self, item: Mapping[str, Any]) -> Message:
        return assistant(self.said(item["answer"]).text) if "answer" in item else dict(item)

    async def _ask(self, index: int) -> int:
        """The number of the answer that the conversation gets next. Raises NoRoom."""
        conversation, limits = self._conversations[index], self._limits
        what, number = self._what, len(self._answers)
        room = min(limits.turn, limits.sequence - len(conversation.prompt))
        if room < 1:
            self._full.add(index)
            raise NoRoom(
                f"the prompt of {len(conversation.prompt)} tokens leaves no room for an answer "
                f"within {limits.sequence}"
            )
        self.doing = f"the engine was to give answer {number + 1}"
        generation = await self._generate(
            conversation.prompt,
            max_tokens=room,
            temperature=limits.temperature,
            seed=turn_seed(what.seeds, number),
            stop=self._chat.stops,
            request=f"{rollout_id(what.group, what.number)}-{number}",
            routes_from=conversation.routed,
        )
        conversation.add_generation(generation)
        self._answers.append((index, len(conversation.answers) - 1))
        self.doing = f"the environment was to judge answer {number + 1}"
        return number


def as_tool(described: Mapping[str, Any]) -> Tool:
    """As chat templates take it, back to ours."""
    function = described["function"]
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})
