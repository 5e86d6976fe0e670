"""Reference models and teachers: their logprobs of what the policy sampled, and answers of their own.

A rollout is complete when its reference has spoken: only then does the journal call it finished, and so the
logprobs are the same whenever its batch is made. A server that does not answer in time ends the run; it goes
on from there when the server does. Nothing is trained without what it was to be trained by.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import numpy as np

from stackrl.runtime.environments.base import Message, user
from stackrl.runtime.inference.client import EngineError, EngineLost, Generation
from stackrl.runtime.inference.reference import (
    ReferenceFailed,
    ReferenceMisnamed,
    ReferenceRefused,
    ReferenceServer,
)
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import Engines, Generate
from stackrl.runtime.orchestrator.errors import BadInput, OrchestratorError
from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.rollout import RolloutError
from stackrl.runtime.orchestrator.tasks import Draw
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.stack import StageSettings, environment_settings
from stackrl.schemas.teachers import Reference, looks_at_reference

DEMONSTRATION = "{question}\n\nA good answer to this is:\n{answer}\n\nAnswer in your own words."
"""What a teacher with a demonstration reads in place of the task's last message."""
_LOSSES = 5
"""Engines that may be lost while one of them is asked about a rollout."""


class References:
    """The reference of one stage. Close it when the stage is over."""

    def __init__(self, settings: StageSettings, chat: Chat, engines: Engines) -> None:
        """Raises BadInput where the secret is not set."""
        self._settings = settings.algorithm.reference
        self._chat, self._engines = chat, engines
        self._asked_about = {
            name
            for name, own in environment_settings(settings).items()
            if looks_at_reference(settings.algorithm, own.component)
        }
        self._writes_for = {e.name for e in settings.environments if e.sampled_by == "reference"}
        self._server = _server(self._settings) if self._settings else None

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    @property
    def limit(self) -> float:
        """Seconds that it may take to tell of a rollout."""
        return self._settings.timeout if self._settings else 0.0

    def writes_for(self, environment: str) -> bool:
        """Whether it samples the answers of ``environment``, in place of the policy."""
        return environment in self._writes_for

    @asynccontextmanager
    async def serving(self, group: int) -> AsyncIterator[Generate]:
        """A place for one rollout whose answers the reference writes, as Engines.serving."""
        async with self._server.room:
            yield self._generate

    async def told(self, rollout: Rollout, draw: Draw) -> Rollout:
        """The rollout with the reference's logprobs of its sampled tokens, where they are wanted.

        Raises RolloutError where the reference cannot tell them of this rollout, and OrchestratorError where
        it does not answer.
        """
        if self._settings is None or rollout.environment not in self._asked_about:
            return rollout
        with _faults_in_words(rollout.environment):
            samples = await asyncio.gather(*(self._sample(sample, draw) for sample in rollout.samples))
        return msgspec.structs.replace(rollout, samples=samples)

    def reads_more(self, draw: Draw) -> int:
        """Tokens by which a sequence of the task has to be shorter than what the run's engines hold, because
        one of them is asked about it with the demonstration in it."""
        if self._settings is None or self._server is not None or draw.name not in self._asked_about:
            return 0
        own, shown = self._prompts(draw)
        return len(shown) - len(own) + 1  # one more is sampled, which nobody needs

    async def _sample(self, sample: Sample, draw: Draw) -> Sample:
        if sample.temperature != 1.0:
            raise BadInput(
                f"a reference tells logprobs at temperature 1, and {sample.environment} is sampled at "
                f"{sample.temperature:g}; say sampling: {{temperature: 1.0}}"
            )
        sampled = np.flatnonzero(sample.loss_mask)
        tokens = sample.tokens[: sampled[-1] + 1].tolist()  # what was said after the last answer was not read
        own, shown = self._prompts(draw) if self._settings.demonstration else ([], [])
        if tokens[: len(own)] != own:
            raise RolloutError(
                f"{sample.environment}: the sequence does not begin with the task's prompt, so that "
                "no demonstration can be put into it"
            )
        logprobs = await self._logprobs(sample.group, shown + tokens[len(own) :])
        reference = np.zeros(len(sample.tokens), dtype="<f4")
        reference[sampled] = logprobs[sampled + len(shown) - len(own)]
        return msgspec.structs.replace(sample, reference=reference)

    def _prompts(self, draw: Draw) -> tuple[list[int], list[int]]:
        """The task's prompt, and what the reference reads in its place."""
        tools = draw.environment.tools
        return self._chat.prompt(draw.task.messages, tools), self._chat.prompt(demonstrated(draw), tools)

    async def _logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        if self._server is not None:
            async with self._server.room:
                return await self._server.logprobs(tokens)
        for _ in range(_LOSSES):
            try:
                return await self._engines.logprobs(group, tokens)
            except EngineLost as error:
                lost = error
            except EngineError as error:
                raise RolloutError(f"the policy as its own reference: {error}") from error
        raise RolloutError(f"lost the engine {_LOSSES} times that was asked for logprobs; {lost}") from lost

    async def _generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[int],
        request: str,
        routes_from: int,
    ) -> Generation:
        with _faults_in_words(f"answer {request}"):
            return await self._server.generate(
                tokens,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop=stop,
                version=self._engines.version,
            )


@contextmanager
def _faults_in_words(whose: str) -> Iterator[None]:
    """RolloutError for what is wrong with ``whose`` request, OrchestratorError for what all would meet."""
    try:
        yield
    except ReferenceRefused as error:
        raise RolloutError(f"{whose}: its reference: {error}") from error
    except ReferenceMisnamed as error:
        raise BadInput(str(error)) from error
    except ReferenceFailed as error:
        raise OrchestratorError(str(error)) from error


def demonstrated(draw: Draw) -> list[Message]:
    """The task's messages with a demonstration in the last one. Raises BadInput where there is none."""
    try:
        turns = draw.environment.demonstration(draw.task, draw.seeds.branch("demonstration").rng(), 0.0)
    except NotImplementedError as error:
        raise BadInput(f"algorithm.reference.demonstration: {error}") from error
    answer = "\n".join(turn.answer for turn in turns if turn.trained)
    *before, last = draw.task.messages
    return [*before, user(DEMONSTRATION.format(question=last["content"], answer=answer))]


def _server(settings: Reference) -> ReferenceServer | None:
    """None: the policy is asked itself."""
    if settings.endpoint is None:
        return None
    key = None
    if settings.secret is not None:
        key = os.environ.get(settings.secret)
        if not key:
            raise BadInput(
                f"algorithm.reference.secret: {settings.secret} is not set where the orchestrator runs; "
                f"add secrets: {{{settings.secret}: null}} and set it where you launch"
            )
    return ReferenceServer(settings.endpoint, settings.model or "", key, settings.requests, settings.timeout)
