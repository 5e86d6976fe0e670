"""An engine without a model: fixed answers, faults on command, and versions that change while it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import numpy as np

from stackrl.runtime.inference.answers import Generation, Prefilled
from stackrl.runtime.inference.client import EngineError, EngineLost, UpdateTimes
from stackrl.runtime.inference.engine_metrics import EngineMetrics
from stackrl.runtime.transport.messages import Span, Version
from stackrl.schemas.roles import Pool

Answer = Callable[[list[int], Random], list[int]]
"""From a prompt's ids and a source of randomness that its seed sets, to the ids of an answer."""
FIRST = Version(0, 0)
T = TypeVar("T")


class FakeEngine:
    """Has the interface of inference.client.Engine. A token is labelled with the version held at its time."""

    def __init__(
        self,
        answer: Answer,
        *,
        token_delay: float = 0.0,
        update_delay: float = 0.0,
        url: str = "http://fake",
        pool: Pool = "inference",
    ) -> None:
        self.answer, self.token_delay, self.update_delay = answer, token_delay, update_delay
        self.url, self.pool = url, pool
        self.prefills: list[dict] = []
        """Prompts that it was to prefill, in order."""
        self.fault_of_transfer: Callable[[Prefilled], None] = lambda prefilled: None
        """Called when this engine fetches the keys of a prompt; may raise."""
        self.transfer_delay = 0.0
        self.forgot = 0
        """Times that its prefix cache was emptied."""
        self.fetched = 0
        self.held: Version | None = FIRST
        """None: weights of no version, as an update that was broken off leaves them."""
        self.updates: list[tuple[Version, str]] = []
        self.requests: list[dict] = []
        """What was asked of it, in order."""
        self.asked: list[list[int]] = []
        """Tokens whose logprobs it was asked for."""
        self.running = 0
        self.room, self.preemptions = 1000, 0
        """See `metrics`."""
        self.fault: Callable[[dict], None] = lambda request: None
        """Called with each request; may raise."""
        self.fault_of_update: Callable[[Version], None] = lambda version: None
        self.closed = False
        self.tells_routes = False
        """See `routes_of`."""
        self._dead = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()

    def die(self) -> None:
        """Connections break, and nobody listens any more."""
        self._dead.set()

    def come_back(self) -> None:
        """A new process at the same address, with its first weights."""
        self.held = FIRST
        self._dead = asyncio.Event()
        self._going.set()

    def hang(self) -> None:
        """Stand still, as by SIGSTOP: connections are taken, and no answer comes."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    async def wait_ready(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self._dead.is_set() or not self._going.is_set():  # noqa: ASYNC110 (as a client does)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise EngineError(f"engine {self.url} was not ready within {timeout:g} s") from None
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
        routes_from: int = 0,
        prefilled: Prefilled | None = None,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> Generation:
        request = {
            "tokens": list(tokens),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "salt": salt,
            "id": request_id,
            "routes_from": routes_from,
            "held": self.held,
        }
        assert request_id not in {earlier["id"] for earlier in self.requests}, "a request id is used twice"
        self.requests.append(request)
        if prefilled is None:
            work = self._sample(request, stop_token_ids)
        else:
            request["prefilled"] = prefilled
            work = self._sample_elsewhere(request, stop_token_ids, prefilled, on_first_token)
        return await self._asked("POST /inference/v1/generate", 3600, work)

    async def prefill(self, tokens: Sequence[int], *, salt: str, request_id: str) -> Prefilled:
        request = {"tokens": list(tokens), "salt": salt, "id": request_id, "held": self.held}
        self.prefills.append(request)
        return await self._asked("POST /inference/v1/generate", 3600, self._keep(request))

    async def fetched_bytes(self) -> float:
        return float(self.fetched)

    async def metrics(self, within: float = 60.0) -> EngineMetrics:
        return await self._asked("GET /metrics", within, self._tell())

    async def forget_prompts(self, within: float = 60.0) -> None:
        self.forgot += 1

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """See `told_of`."""
        self.asked.append(list(tokens))
        return await self._asked("POST /inference/v1/generate", 3600, self._told(tokens))

    async def version(self, within: float = 60.0) -> Version:
        return await self._asked("GET /weight_info", within, self._label())

    async def settle(self) -> Version | None:
        try:
            return await self.version()
        except EngineLost:
            raise
        except EngineError:
            return None

    async def update(self, version: Version, source: str, kv: str, timeout: float) -> UpdateTimes:
        await self._asked("POST /update_weights", timeout, self._load(version, source))
        return UpdateTimes(pause=0.0, load=self.update_delay, total=self.update_delay)

    async def close(self) -> None:
        self.closed = True

    async def _sample(self, request: dict, stop: Sequence[int]) -> Generation:
        self.fault(request)
        rng = Random(request["seed"] if request["temperature"] else 0)
        answer = self.answer(list(request["tokens"]), rng)[: request["max_tokens"]]
        spans: list[Span] = []
        self.running += 1
        try:
            for position in range(len(answer)):
                await asyncio.sleep(self.token_delay)
                await self._going.wait()
                held = await self._label()
                if spans and spans[-1].version == held:
                    spans[-1] = Span(spans[-1].start, position + 1, held)
                else:
                    spans.append(Span(position, position + 1, held))
        finally:
            self.running -= 1
        return Generation(
            tokens=answer,
            logprobs=[-rng.random() for _ in answer],
            spans=spans,
            finish_reason="stop" if answer[-1] in stop else "length",
            cached=0,
            routes=routes_of([*request["tokens"], *answer[:-1]])[request["routes_from"] :]
            if self.tells_routes
            else None,
        )

    async def _sample_elsewhere(
        self, request: dict, stop: Sequence[int], prefilled: Prefilled, on_first_token: Callable[[], None]
    ) -> Generation:
        """As an engine of `roles.decode`, which fetches the prompt's keys first."""
        assert prefilled.transfer["tokens"] == request["tokens"], "the keys are those of another prompt"
        await asyncio.sleep(self.transfer_delay)
        self.fault_of_transfer(prefilled)
        await self._going.wait()
        self.fetched += len(request["tokens"])
        on_first_token()
        return replace(await self._sample(request, stop), prefilled=prefilled.version)

    async def _keep(self, request: dict) -> Prefilled:
        """As an engine of `roles.prefill`."""
        self.fault(request)
        await asyncio.sleep(self.token_delay)
        return Prefilled(await self._label(), 0, {"tokens": request["tokens"], "url": self.url})

    async def _tell(self) -> EngineMetrics:
        """`room` requests fill its cache; the others wait, and it has put back one when it was asked."""
        running = min(self.running, self.room)
        queued = self.running - running
        self.preemptions += queued > 0
        return EngineMetrics(
            cache_use=running / self.room,
            running=running,
            queued=queued,
            arriving=0,
            preemptions=self.preemptions,
            prompt_tokens=len(self.requests),
            prompt_hits=0,
            fetched_tokens=self.fetched,
            fetched_bytes=float(self.fetched),
        )

    async def _told(self, tokens: Sequence[int]) -> np.ndarray:
        return told_of(tokens)

    async def _label(self) -> Version:
        if self.held is None:
            raise EngineError(f"engine {self.url}: its weights are of no version")
        return self.held

    async def _load(self, version: Version, source: str) -> None:
        await asyncio.sleep(self.update_delay)
        self.fault_of_update(version)
        await self._going.wait()
        self.held = version
        self.updates.append((version, source))

    async def _asked(self, operation: str, limit: float, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives, unless the engine dies meanwhile or is silent for ``limit`` seconds."""
        dying = asyncio.create_task(self._dead.wait())
        working = asyncio.create_task(self._when_going(work))
        try:
            await asyncio.wait([dying, working], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise EngineLost(f"engine {self.url}: {operation} failed: connection refused")
            if not working.done():
                raise EngineLost(f"engine {self.url}: {operation} got no answer in {limit:g} s")
            return working.result()
        finally:
            dying.cancel()
            working.cancel()
            await asyncio.gather(dying, working, return_exceptions=True)

    async def _when_going(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self._going.wait()
            return await work
        finally:
            work.close()


def told_of(tokens: Sequence[int]) -> np.ndarray:
    """Logprobs that depend on each token and on how many come before it."""
    told = [-(token % 11 + place / 100) for place, token in enumerate(tokens)]
    return np.array([0.0, *told[1:]], "<f4")


def routes_of(tokens: Sequence[int]) -> np.ndarray:
    """Two experts in each of three layers, by the token."""
    routes = [[[(token + layer) % 100, token % 7 + 100] for layer in range(3)] for token in tokens]
    return np.array(routes, "|i1")


def refuse(request: dict) -> None:
    """A fault: the engine refuses a request."""
    raise EngineError("engine http://fake: POST /inference/v1/generate answered 500: connection refused")
