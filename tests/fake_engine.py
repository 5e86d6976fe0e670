"""An engine without a model: fixed answers, faults on command, and versions that change while it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from stackrl.runtime.inference.client import EngineError, Generation, UpdateTimes
from stackrl.runtime.transport.messages import Span, Version

Answer = Callable[[list[int], Random], list[int]]
"""From a prompt's ids and a source of randomness that its seed sets, to the ids of an answer."""


class FakeEngine:
    """Has the interface of inference.client.Engine. A token is labelled with the version held at its time."""

    def __init__(self, answer: Answer, *, token_delay: float = 0.0, update_delay: float = 0.0) -> None:
        self.answer, self.token_delay, self.update_delay = answer, token_delay, update_delay
        self.held = Version(0, 0)
        self.updates: list[tuple[Version, str]] = []
        self.requests: list[dict] = []
        """What was asked of it, in order."""
        self.running = 0
        self.fault: Callable[[dict], None] = lambda request: None
        """Called with each request; may raise."""
        self.fault_of_update: Callable[[Version], None] = lambda version: None
        self.closed = False

    async def wait_ready(self, timeout: float) -> None:
        await asyncio.sleep(0)

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        salt: str,
        stop_token_ids: Sequence[int],
        request_id: str,
    ) -> Generation:
        request = {
            "tokens": list(tokens),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "salt": salt,
            "id": request_id,
            "held": self.held,
        }
        assert request_id not in {earlier["id"] for earlier in self.requests}, "a request id is used twice"
        self.requests.append(request)
        self.fault(request)
        rng = Random(seed if temperature else 0)
        answer = self.answer(list(tokens), rng)[:max_tokens]
        spans: list[Span] = []
        self.running += 1
        try:
            for position in range(len(answer)):
                await asyncio.sleep(self.token_delay)
                if spans and spans[-1].version == self.held:
                    spans[-1] = Span(spans[-1].start, position + 1, self.held)
                else:
                    spans.append(Span(position, position + 1, self.held))
        finally:
            self.running -= 1
        logprobs = [-rng.random() for _ in answer]
        return Generation(
            tokens=answer,
            logprobs=logprobs,
            spans=spans,
            finish_reason="stop" if answer[-1] in stop_token_ids else "length",
            cached=0,
        )

    async def version(self) -> Version:
        return self.held

    async def update(self, version: Version, source: str, kv: str, timeout: float) -> UpdateTimes:
        await asyncio.sleep(self.update_delay)
        self.fault_of_update(version)
        self.held = version
        self.updates.append((version, source))
        return UpdateTimes(pause=0.0, load=self.update_delay, total=self.update_delay)

    async def close(self) -> None:
        self.closed = True


def refuse(request: dict) -> None:
    """A fault: the engine cannot be reached."""
    raise EngineError("engine http://fake: POST /inference/v1/generate failed: connection refused")
