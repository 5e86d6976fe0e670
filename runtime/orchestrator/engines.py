"""The engines of a run as one: which version they hold, and which of them serves a group."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from stackrl.runtime.inference.client import Engine, EngineError, Generation
from stackrl.runtime.orchestrator.engine_life import RETRY_AFTER, EngineLife, Report, Status, Wanted
from stackrl.runtime.orchestrator.engine_load import EngineLoad, Loads
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.prefill import Prefills
from stackrl.runtime.orchestrator.seats import Seat
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.inference import Weights
from stackrl.schemas.roles import Pool

ENGINE_LIMIT = 1800.0
"""Seconds within which an engine serves after its start, and after its death."""
LEAVE_LIMIT = 60.0
"""Seconds that an engine which leaves has for its last answers; the others are asked for again elsewhere."""

Generate = Callable[..., Awaitable[Generation]]
"""One engine, for one rollout: see Engines._generate."""


class Engines:
    """All engines. Those that serve hold the newest version that was aimed at; the others come to it.

    A group's rollouts go to one engine, which caches their prompt once; while that one is away they go to
    another. ``requests`` rollouts run on an engine at once; the others wait their turn here, so that their
    time limit does not run meanwhile.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        requests: int,
        weights: Weights,
        *,
        silence: float = 60.0,
        adaptive: bool = False,
    ) -> None:
        """``silence``: seconds without an answer after which an engine is lost; ``adaptive``: fewer rollouts
        where an engine has no room for ``requests``."""
        self._weights = weights
        self._news = asyncio.Event()
        """Set, and replaced, when the status of an engine changes."""
        self._listeners: list[Callable[[], None]] = []
        self.loads = Loads()
        """What the engines tell of themselves."""
        self._life = lambda client: EngineLife(
            client, EngineLoad(client, requests, adaptive, self.loads), weights, silence, self._changed
        )
        self._lives = [self._life(engine) for engine in engines]
        self._leaving: list[EngineLife] = []
        self._living: dict[EngineLife, asyncio.Task[None]] = {}
        self._prefills = Prefills(lambda: self._pool("prefill"), self._change)
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
        """Whether requests are taken: an engine of each pool has started and is not being updated."""
        pools = {life.pool for life in self._lives}
        return bool(pools) and pools == {life.pool for life in self._lives if life.status == Status.SERVING}

    async def serve(self, report: Report, within: float = ENGINE_LIMIT) -> None:
        """Wait for the engines, keep them on the newest version, bring back those that die; for ever.

        ``report`` takes the events engines_ready, weights_updated, engine_lost, engine_back, engine_joined
        and engine_left. Raises EngineError, within a group, naming an engine that stays away for ``within``
        seconds, or that lives but fails to update twice.
        """
        self._report, self._within = report, within
        async with asyncio.TaskGroup() as self._tasks:
            for life in self._lives:
                self._begin(life)

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

    def serving(self, group: int) -> Seat:
        """A place on an engine, the group's own if it lives, for one rollout; to be used as a context.

        Raises EngineLost where the rollout has to begin anew because its engine died: also in the place of
        another error, when the engine is found to be the cause.
        """
        return Seat(partial(self._alive, group), partial(self._generate, group))

    def join(self, client: Engine) -> None:
        """Let an engine take part once it holds what is wanted, as from now on all do. `serve` is running."""
        life = self._life(client)
        if self._wanted is not None:
            life.want(self._wanted)
        self._lives.append(life)
        self._begin(life)
        self._tasks.create_task(self._welcome(life))

    def leave(self, url: str) -> None:
        """Let nothing begin on the engine at ``url``, and forget it when what it does is done. `serve` is
        running."""
        [life] = [life for life in self._lives if life.client.url == url]
        self._lives.remove(life)
        self._leaving.append(life)
        self._tasks.create_task(self._see_off(life))
        self._changed()

    async def close(self) -> None:
        """Close the clients of all engines that are there."""
        for life in [*self._lives, *self._leaving]:
            await life.client.close()

    @property
    def urls(self) -> list[str]:
        """Of the engines that take part."""
        return [life.client.url for life in self._lives]

    @property
    def in_use(self) -> list[str]:
        """URLs of all engines that may be asked something, those that are leaving included."""
        return [life.client.url for life in [*self._lives, *self._leaving]]

    async def logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        """As inference.client.Engine.logprobs, of the group's engine with the weights that it holds."""
        life = await self._alive(group, prompts=True)
        async with life.slots:
            await life.serves()
            return await life.logprobs(tokens)

    def _begin(self, life: EngineLife) -> None:
        self._living[life] = self._tasks.create_task(self._live(life))

    async def _live(self, life: EngineLife) -> None:
        try:
            await life.live(self._report, self._within)
        except* EngineError:
            if not life.leaving:
                raise

    async def _welcome(self, life: EngineLife) -> None:
        began = time.monotonic()
        while life.status == Status.STARTING and not life.leaving:
            await self._change()
        if life.alive:
            seconds = time.monotonic() - began
            self._report("engine_joined", engine=life.client.url, version=str(life.version), seconds=seconds)

    async def _see_off(self, life: EngineLife) -> None:
        await life.leave(LEAVE_LIMIT)
        self._living.pop(life).cancel()
        await life.client.close()
        self._leaving.remove(life)
        self._report("engine_left", engine=life.client.url)
        self._changed()

    def states(self) -> str:
        """Each engine's address and status, and what is wrong with it, for people."""
        return ", ".join(
            f"{life.client.url} {life.status}" + ("" if life.alive else f": {life.reason}")
            for life in self._lives
        )

    async def _alive(self, group: int, prompts: bool = False) -> EngineLife:
        """The group's engine, or the next one that lives: of those that answer, or, for ``prompts`` alone, of
        those that prefill. Each engine's own limit bounds the wait."""
        while True:
            lives = self._pool("prefill" if prompts else "decode") or self._pool("inference")
            for place in range(len(lives)):
                life = lives[(group + place) % len(lives)]
                if life.alive:
                    return life
            await self._change()

    def _pool(self, name: Pool) -> list[EngineLife]:
        return [life for life in self._lives if life.pool == name]

    async def _generate(
        self,
        group: int,
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
        generate = partial(self._prefills.generate, life, group) if life.pool == "decode" else life.generate
        with self.busy:
            generation = await generate(
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
