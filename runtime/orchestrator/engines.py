"""The engines of a run as one: which version they hold, and which of them serves a group."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from stackrl.runtime.inference.client import Engine, Generation
from stackrl.runtime.orchestrator.engine_life import RETRY_AFTER, EngineLife, Report, Status, Wanted
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.inference import Weights

ENGINE_LIMIT = 1800.0
"""Seconds within which an engine serves after its start, and after its death."""

Generate = Callable[..., Awaitable[Generation]]
"""One engine, for one rollout: see Engines._generate."""


class Engines:
    """All engines. Those that serve hold the newest version that was aimed at; the others come to it.

    A group's rollouts go to one engine, which caches their prompt once; while that one is away they go to
    another. ``requests`` rollouts run on an engine at once; the others wait their turn here, so that their
    time limit does not run meanwhile.
    """

    def __init__(
        self, engines: Sequence[Engine], requests: int, weights: Weights, *, silence: float = 60.0
    ) -> None:
        """``silence``: seconds without an answer after which an engine is lost."""
        self._weights = weights
        self._news = asyncio.Event()
        """Set, and replaced, when the status of an engine changes."""
        self._listeners: list[Callable[[], None]] = []
        self._lives = [EngineLife(engine, requests, weights, silence, self._changed) for engine in engines]
        self._wanted: Wanted | None = None
        self._report: Report = lambda name, **fields: None
        self._announced = Version(0, 0)
        self._started = False
        self._requests = map("{}-{}".format, itertools.repeat(secrets.token_hex(3)), itertools.count())
        """Ends of request ids: an engine may still know those of an orchestrator that died."""
        self.version = Version(0, 0)
        """What all engines hold that serve."""
        self.generated = 0
        """Tokens sampled so far."""
        self.busy = BusyTime()

    @property
    def exist(self) -> bool:
        """Whether the run has any."""
        return bool(self._lives)

    @property
    def update_limit(self) -> float:
        """Seconds that an update of a living engine may take, its repetition included."""
        return 2 * self._weights.timeout + RETRY_AFTER

    @property
    def serving_now(self) -> bool:
        """Whether requests are taken: an engine has started and is not being updated."""
        return any(life.status == Status.SERVING for life in self._lives)

    async def serve(self, report: Report, within: float = ENGINE_LIMIT) -> None:
        """Wait for the engines, keep them on the newest version, bring back those that die; for ever.

        ``report`` takes the events engines_ready, weights_updated, engine_lost and engine_back. Raises
        EngineError, within a group, naming an engine that stays away for ``within`` seconds, or that lives
        but fails to update twice.
        """
        self._report = report
        async with asyncio.TaskGroup() as tasks:
            for life in self._lives:
                tasks.create_task(life.live(report, within))

    def aim(self, version: Version, source: str) -> None:
        """Bring the engines to ``version``, which ``source`` serves; a newer aim replaces an older one."""
        if self._wanted is None or version > self._wanted.version:
            self._wanted = Wanted(version, source)
            for life in self._lives:
                life.want(self._wanted)

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when an engine begins or ceases to serve; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def holding(self, version: Version, within: float) -> None:
        """Wait until an engine serves, and all that serve hold ``version`` or newer.

        Raises OrchestratorError after ``within`` seconds.
        """
        try:
            async with asyncio.timeout(within):
                while not (self.serving_now and self.version >= version):
                    await self._change()
        except TimeoutError:
            raise OrchestratorError(
                f"the engines hold {self.version} and did not get {version} within {within:.0f} s "
                f"({self.states()}); see the logs of the trainer and the engines"
            ) from None

    @asynccontextmanager
    async def serving(self, group: int) -> AsyncIterator[Generate]:
        """A place on an engine, the group's own if it lives, for one rollout.

        Raises EngineLost where the rollout has to begin anew because its engine died: also in the place of
        another error, when the engine is found to be the cause.
        """
        while True:
            life = await self._alive(group)
            async with life.slots:
                if not await life.serves():
                    continue
                try:
                    yield partial(self._generate, life)
                except Exception:
                    await life.check()
                    raise
                return

    async def logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        """As inference.client.Engine.logprobs, of the group's engine with the weights that it holds."""
        life = await self._alive(group)
        async with life.slots:
            await life.serves()
            return await life.logprobs(tokens)

    def states(self) -> str:
        """Each engine's address and status, and what is wrong with it, for people."""
        return ", ".join(
            f"{life.client.url} {life.status}" + ("" if life.alive else f": {life.reason}")
            for life in self._lives
        )

    async def _alive(self, group: int) -> EngineLife:
        """The group's engine, or the next one that lives. Each engine's own limit bounds the wait."""
        while True:
            for place in range(len(self._lives)):
                life = self._lives[(group + place) % len(self._lives)]
                if life.alive:
                    return life
            await self._change()

    async def _generate(
        self,
        life: EngineLife,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[int],
        request: str,
        routes_from: int,
    ) -> Generation:
        """Sample an answer. None begins during an update, so that its cache salt names the right version."""
        await life.serves()
        with self.busy:
            generation = await life.generate(
                tokens,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop_token_ids=stop,
                request_id=f"{request}-{next(self._requests)}",
                routes_from=routes_from,
            )
        self.generated += len(generation.tokens)
        return generation

    async def _change(self) -> None:
        await self._news.wait()

    def _changed(self) -> None:
        """An engine's status is another one."""
        serving = [life for life in self._lives if life.status == Status.SERVING]
        if serving:
            self.version = max(self.version, min(life.version for life in serving))
        self._announce(serving)
        self._news.set()
        self._news = asyncio.Event()
        for listener in self._listeners:
            listener()

    def _announce(self, serving: Sequence[EngineLife]) -> None:
        """Tell of a version that all living engines hold, and once of the start."""
        statuses = {life.status for life in self._lives}
        if not self._started and Status.STARTING not in statuses:
            self._started = True
            self._report("engines_ready")
        if Status.UPDATING not in statuses and self.version > self._announced:
            self._announced = self.version
            if seconds := max((life.update_seconds for life in serving), default=0.0):
                self._report("weights_updated", version=str(self.version), seconds=seconds)


class BusyTime:
    """Seconds during which at least one request was running. Enter it for each request."""

    def __init__(self) -> None:
        self._running, self._since, self._total = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1

    def __exit__(self, *error: object) -> None:
        self._running -= 1
        if not self._running:
            self._total += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._total + (time.monotonic() - self._since if self._running else 0.0)
