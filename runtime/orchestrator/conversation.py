"""The tokens of one rollout, turn by turn, kept exactly as they were sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stackrl.runtime.environments.base import Answer, Message, Tool, Turn
from stackrl.runtime.orchestrator.chat import Chat, TemplateError
from stackrl.runtime.transport.messages import NO_ROUTE, Sample, Span

if TYPE_CHECKING:
    from stackrl.runtime.inference.client import Generation


class _Sequence:
    """One growing training sequence: a list per array of Sample."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self.mask = [0] * len(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.spans: list[Span] = []
        self.routes: list[np.ndarray] = []
        """Of the first tokens, in parts; those of the others are not known."""

    @property
    def routed(self) -> int:
        """How many tokens have routes."""
        return sum(map(len, self.routes))

    def add(self, tokens: Sequence[int], *, trained: bool, logprobs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.mask += [int(trained)] * len(tokens)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)

    def sample(self, rollout: str, group: int, environment: str, temperature: float) -> Sample:
        return Sample(
            rollout=rollout,
            group=group,
            environment=environment,
            tokens=np.array(self.tokens, dtype="<i4"),
            loss_mask=np.array(self.mask, dtype="|u1"),
            logprobs=np.array(self.logprobs, dtype="<f4"),
            spans=self.spans,
            temperature=temperature,
            routes=self._routes(),
        )

    def _routes(self) -> np.ndarray | None:
        if not self.routes:
            return None
        known = np.concatenate(self.routes)
        unknown = np.full((len(self.tokens) - len(known), *known.shape[1:]), NO_ROUTE, known.dtype)
        return np.concatenate([known, unknown])


class Conversation:
    """Messages of a rollout and their tokens. Answers are added, then the environment's messages, in turn."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """``tools`` are told to the model, and calls of them are found in its answers."""
        self._chat, self._tools = chat, tools
        self._messages = list(messages)
        self._sequences = [_Sequence(chat.prompt(messages, tools))]
        self._end: int | None = None
        """The token with which the last answer ended; None where it was cut off."""
        self._thoughtful = False
        """Whether the last sequence has thoughts of the model."""
        self.answers: list[Answer] = []
        self.sampled = 0
        """Tokens that the engine sampled."""
        self.prefix_breaks = 0
        """Times that the template did not continue the tokens before, so that a new sequence began."""

    @property
    def prompt(self) -> list[int]:
        """Ids that the model's next answer follows."""
        return self._sequences[-1].tokens

    @property
    def routed(self) -> int:
        """How many tokens of the prompt have told which experts they went through."""
        return self._sequences[-1].routed

    def add_generation(self, generation: Generation) -> None:
        """Append an answer of the engine. Raises ValueError where its parts do not belong together."""
        _check(generation)
        sequence, start = self._sequences[-1], len(self.prompt)
        sequence.add(generation.tokens, trained=True, logprobs=generation.logprobs)
        for span in generation.spans:
            sequence.spans.append(Span(start + span.start, start + span.end, span.version))
        if generation.routes is not None:
            # the engine has not computed the last token yet: it does where an answer follows
            expected = len(sequence.tokens) - 1 - sequence.routed
            if len(generation.routes) != expected:
                raise ValueError(f"the engine told routes of {len(generation.routes)} tokens, not {expected}")
            sequence.routes.append(generation.routes)
        self.sampled += len(generation.tokens)
        self._add_answer(self._chat.text(generation.tokens), self._chat.end(generation.tokens))

    def add_turn(self, turn: Turn) -> None:
        """Append an answer of a demonstration."""
        tokens = self._chat.answer(turn.answer, turn.messages)
        self._sequences[-1].add(tokens, trained=turn.trained)
        self._add_answer(turn.answer, tokens[-1])

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what the environment says to the last answer."""
        self._messages += messages
        if self._thoughtful and self._chat.forgets(messages):
            self._begin_anew()
            return
        try:
            delta = self._chat.delta(messages, self._end)
        except TemplateError:
            self._begin_anew()
        else:
            self._sequences[-1].add(delta, trained=False)

    def samples(self, rollout: str, group: int, environment: str, temperature: float) -> list[Sample]:
        """The training sequences: one, and one more for each prefix break."""
        return [
            sequence.sample(rollout, group, environment, temperature)
            for sequence in self._sequences
            if any(sequence.mask)
        ]

    def _add_answer(self, text: str, end: int | None) -> None:
        calls, thinking = self._chat.calls(text, self._tools), self._chat.opens_thoughts
        answer = Answer(text, calls, closed=end is not None, thinking=thinking)
        self._messages.append(self._chat.remembered(answer))
        self.answers.append(answer)
        self._end, self._thoughtful = end, self._thoughtful or self._chat.thought(text)

    def _begin_anew(self) -> None:
        """Begin a new sequence with the history as the template now writes it."""
        self.prefix_breaks += 1
        self._sequences.append(_Sequence(self._chat.prompt(self._messages, self._tools)))
        self._thoughtful = False


def demonstrate(
    chat: Chat, messages: Sequence[Message], turns: Sequence[Turn], tools: Sequence[Tool] = ()
) -> Conversation:
    """A conversation that goes as ``turns`` say, tokenised as a rollout's is."""
    conversation = Conversation(chat, messages, tools)
    for turn in turns:
        conversation.add_turn(turn)
        if turn.messages:
            conversation.add_messages(turn.messages)
    return conversation


def _check(generation: Generation) -> None:
    """An answer without a version or a logprob for a token must not be trained on."""
    length = len(generation.tokens)
    if length == 0:
        raise ValueError("the engine sampled nothing")
    if len(generation.logprobs) != length or not all(map(math.isfinite, generation.logprobs)):
        raise ValueError(f"the engine gave no finite logprob for each of {length} tokens")
    ends = [0, *(span.end for span in generation.spans)]
    starts = [*(span.start for span in generation.spans), length]
    if ends != starts:
        raise ValueError(f"the engine's versions {generation.spans} do not cover {length} tokens")
