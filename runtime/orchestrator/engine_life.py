"""One engine of the run, which may die and come back at any time.

    starting ─► serving ⇄ updating        lost ─► serving
                    └──────────┴─────────► lost

It is told which version is wanted, and serves only while it holds that one. What it holds is asked, never
assumed: a restarted engine has its first weights again, and one whose last client died may have anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from stackrl.runtime.inference.answers import FIRST_VERSION, Generation, Prefilled
from stackrl.runtime.inference.client import Engine, EngineError, EngineLost
from stackrl.runtime.orchestrator.engine_load import EngineLoad
from stackrl.runtime.orchestrator.transfers import Transfers
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.inference import Weights
from stackrl.schemas.roles import Pool

RETRY_AFTER = 2.0
"""Seconds between something that failed and its repetition."""
LOOK_EVERY = 0.05
"""Seconds between two looks at what an engine that leaves still does."""
HEALTH_EVERY = 5.0
"""Seconds between two questions to an engine that serves."""
TRANSFER_LIMIT = 60.0
"""Seconds that an update waits for prompts on their way between two engines."""

log = logging.getLogger(__name__)


class Report(Protocol):
    """Takes an event of the run, as monitor.metrics.Sink does."""

    def __call__(self, name: str, **fields: Any) -> None: ...


class Status(StrEnum):
    STARTING = "starting"
    """It has not served yet."""
    SERVING = "serving"
    UPDATING = "updating"
    LOST = "lost"
    """It served, and does not answer."""


@dataclass(frozen=True)
class Wanted:
    """The version that an engine is to hold, and where it is served."""

    version: Version
    source: str


class EngineLife:
    """An engine from its start on, through all its deaths. ``live`` runs it; the rest asks it or uses it."""

    def __init__(
        self,
        client: Engine,
        load: EngineLoad,
        weights: Weights,
        silence: float,
        on_change: Callable[[], None],
    ) -> None:
        """``silence``: seconds without an answer, then it is lost. ``on_change`` hears of a new status."""
        self.client = client
        self.load, self.slots = load, load.places
        self.status = Status.STARTING
        self.version: Version | None = None
        """What it holds; None: unknown, or weights of no version."""
        self.update_seconds = 0.0
        """That its newest update took; 0 where it came back with what was wanted."""
        self.leaving = False
        """Whether nothing is to begin on it any more, for it leaves the run."""
        self.reason = f"engine {client.url} has not answered yet"
        """Why it is away, with its address."""
        self._weights, self._silence, self._on_change = weights, silence, on_change
        self._wanted: Wanted | None = None
        self._asking = asyncio.Lock()
        """Held while it is updated or asked: during an update it cannot answer."""
        self._news = asyncio.Event()
        """There is something to do before the next question is due."""
        self._serving = asyncio.Event()
        self.transfers = Transfers()
        """Prompts on their way to this engine, or from it."""
        self._running: set[asyncio.Timeout] = set()
        """One for each request, to end it by."""
        self._report: Report = lambda name, **fields: None

    @property
    def alive(self) -> bool:
        return self.status in (Status.SERVING, Status.UPDATING)

    @property
    def pool(self) -> Pool:
        """The key under `roles:` that it belongs to."""
        return self.client.pool

    def want(self, wanted: Wanted) -> None:
        """Hold this from now on. Requests begin again once it does."""
        self._wanted = wanted
        if self._behind and self.status == Status.SERVING:
            self._become(Status.UPDATING)
        self._news.set()

    async def live(self, report: Report, within: float) -> None:
        """Runs for ever: wait for the engine, serve, notice its death, wait again.

        Raises EngineError where it stays away for ``within`` seconds, and where it lives but an update of it
        fails twice.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.load.watch())
            await self._live(report, within)

    async def _live(self, report: Report, within: float) -> None:
        self._report = report
        while True:
            began = time.monotonic()
            await self._arrive(within)
            if self.status == Status.LOST:
                seconds = time.monotonic() - began
                report("engine_back", engine=self.client.url, version=str(self.version), seconds=seconds)
            self._become(Status.SERVING)
            await self._serve()

    async def leave(self, within: float) -> None:
        """Let nothing begin on it, and wait for what it does; what takes more than ``within`` seconds ends by
        EngineLost."""
        self.leaving = True
        deadline = time.monotonic() + within
        while (self._running or self.transfers) and time.monotonic() < deadline:  # noqa: ASYNC110 (two things)
            await asyncio.sleep(LOOK_EVERY)
        self._end(f"engine {self.client.url} has left the run")

    async def serves(self) -> bool:
        """Wait until requests may begin; False where it was lost instead."""
        while self.status == Status.UPDATING:
            with contextlib.suppress(EngineLost):
                async with self._until_lost():
                    await self._serving.wait()
        return self.status == Status.SERVING

    async def check(self) -> None:
        """Ask whether it is still there, with what it held. Raises EngineLost, and then it is lost.

        Something failed on it; this tells whether the engine is to blame.
        """
        async with self._asking:
            if not self.alive:
                raise self._lost()
            try:
                held = await self.client.version(self._silence)
            except EngineError as error:
                self._lose(str(error))
            else:
                if held != self.version:
                    self._lose(
                        f"engine {self.client.url} holds {held} instead of {self.version}: started again"
                    )
            if not self.alive:
                raise self._lost()

    async def generate(self, tokens: Sequence[int], **request: Any) -> Generation:
        """One request, for when it `serves`. Raises EngineLost where it dies meanwhile, else EngineError."""
        async with self._until_lost():
            held = self.version
            generation = await self.client.generate(tokens, salt=str(held), **request)
        if held != FIRST_VERSION and any(span.version == FIRST_VERSION for span in generation.spans):
            await self.check()
            raise EngineLost(f"engine {self.client.url} answered with its first weights, not with {held}")
        return generation

    async def prefill(self, tokens: Sequence[int], *, request_id: str) -> Prefilled:
        """As the client's, of an engine that `serves`. Raises EngineLost where it dies meanwhile, else
        EngineError."""
        async with self._until_lost():
            held = self.version
            prefilled = await self.client.prefill(tokens, salt=str(held), request_id=request_id)
        if held != FIRST_VERSION and prefilled.version == FIRST_VERSION:
            await self.check()
            raise EngineLost(f"engine {self.client.url} prefilled with its first weights, not with {held}")
        return prefilled

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """As the client's. Raises EngineLost where it dies meanwhile, else EngineError."""
        async with self._until_lost():
            return await self.client.logprobs(tokens)

    @asynccontextmanager
    async def _until_lost(self) -> AsyncIterator[None]:
        """Ends what is done within by EngineLost when the engine is lost."""
        if not self.alive:
            raise self._lost()
        try:
            async with asyncio.timeout(None) as scope:
                self._running.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise self._lost() from None
            raise
        finally:
            self._running.discard(scope)

    @property
    def _behind(self) -> bool:
        wanted = self._wanted
        return wanted is not None and (self.version is None or self.version < wanted.version)

    async def _arrive(self, within: float) -> None:
        """Wait until the engine answers and holds what is wanted."""
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            await self.client.wait_ready(left)
            try:
                self.version, self.update_seconds = await self.client.settle(), 0.0
                if self.pool == "decode" and self.status == Status.LOST:
                    # it may have read keys long after they were kept for it
                    await self.client.forget_prompts()
            except EngineError as error:
                self.reason = str(error)
            else:
                try:
                    await self._update_from_whatever()
                    return
                except EngineLost as error:
                    self.reason = str(error)
            log.warning("not there yet: %s", self.reason)
            await asyncio.sleep(RETRY_AFTER)
        raise EngineError(f"engine {self.client.url} did not serve within {within:g} s: {self.reason}")

    async def _update_from_whatever(self) -> None:
        """Weights of no version stay unused until there is something to replace them by."""
        while self.version is None and self._wanted is None:
            self._news.clear()
            await self._news.wait()
        await self._update()

    async def _serve(self) -> None:
        """Follow what is wanted, and ask now and then whether it is there. Returns when it is lost."""
        while self.alive:
            try:
                if self._behind:
                    async with self._asking:
                        if self.alive:
                            await self._update()
                            self._become(Status.SERVING)
                elif not await self._called(HEALTH_EVERY):
                    await self.check()
            except EngineLost as error:
                self._lose(str(error))

    async def _update(self) -> None:
        """Bring it to what is wanted. Raises EngineLost, or EngineError where it lives and fails twice."""
        failed: Version | None = None
        while self._behind:
            await self.transfers.over(TRANSFER_LIMIT)
            wanted, began = self._wanted, time.monotonic()
            try:
                await self.client.update(wanted.version, wanted.source, self._kv, self._weights.timeout)
            except EngineLost:
                raise
            except Exception as error:
                self.version = await self._survived(error)
                if wanted.version == failed == self._wanted.version:
                    raise
                log.warning("the update to %s failed; another try follows", wanted.version, exc_info=True)
                failed = wanted.version
                await asyncio.sleep(RETRY_AFTER)
            else:
                self.version, self.update_seconds = wanted.version, time.monotonic() - began

    @property
    def _kv(self) -> str:
        """What an update does to the cache. A prefill engine has no request that goes on after one."""
        return "keep" if self.pool == "prefill" else self._weights.kv

    async def _survived(self, error: Exception) -> Version | None:
        """What the engine holds after an update that failed by ``error``. Raises EngineLost if it died."""
        try:
            return await self.client.settle()
        except EngineError as silence:
            raise EngineLost(f"{error}; then {silence}") from error

    async def _called(self, seconds: float) -> bool:
        """Wait for news, for so long at most; whether there were some."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def _become(self, status: Status) -> None:
        self.status = status
        self.load.serves(status == Status.SERVING)
        if status == Status.SERVING:
            self._serving.set()
        else:
            self._serving.clear()
        self._on_change()

    def _lose(self, reason: str) -> None:
        """It does not answer: its requests end, and ``live`` waits for it."""
        if not self.alive:
            return
        log.warning("lost: %s", reason)
        self._end(reason)
        self._report("engine_lost", engine=self.client.url, reason=reason)

    def _end(self, reason: str) -> None:
        """Whatever it was doing is over."""
        self.reason, self.version = reason, None
        self._become(Status.LOST)
        running, self._running = self._running, set()
        now = asyncio.get_running_loop().time()
        for request in running:
            request.reschedule(now)
        self.transfers.give_up()
        self._news.set()

    def _lost(self) -> EngineLost:
        return EngineLost(self.reason)
