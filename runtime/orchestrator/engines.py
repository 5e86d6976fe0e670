"""The engines of a run as one: which version they hold, and which of them serves a group."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.inference import Weights

if TYPE_CHECKING:
    from stackrl.runtime.inference.client import Engine, Generation

RETRY_AFTER = 2.0
"""Seconds between an update that failed and its repetition."""

log = logging.getLogger(__name__)

Generate = Callable[..., Awaitable["Generation"]]
"""One engine, for one rollout: see Engines._generate."""
OnUpdate = Callable[[Version, float], None]
"""Called with the version that all engines hold now and the seconds that it took."""


class Engines:
    """All engines, always on one version but for the time of an update.

    A group's rollouts go to one engine, which caches their prompt once. ``requests`` rollouts run on an
    engine at once; the others wait their turn here, so that their time limit does not run meanwhile.
    """

    def __init__(self, engines: Sequence[Engine], requests: int, weights: Weights) -> None:
        self._engines, self._weights = list(engines), weights
        self._slots = [asyncio.Semaphore(requests) for _ in engines]
        self._target: tuple[Version, str] | None = None
        self._aimed = asyncio.Event()
        self._steady = asyncio.Event()
        self._updated = asyncio.Condition()
        self._listeners: list[OnUpdate] = []
        self._requests = itertools.count()
        self.version = Version(0, 0)
        """What all engines hold."""
        self.generated = 0
        """Tokens sampled so far."""
        self.busy = BusyTime()

    @property
    def update_limit(self) -> float:
        """Seconds that an update may take, its repetition included."""
        return 2 * self._weights.timeout + RETRY_AFTER

    async def ready(self, within: float) -> None:
        """Wait until every engine serves. Raises EngineError naming the one that does not."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.wait_ready(within))
        self._steady.set()

    @property
    def serving_now(self) -> bool:
        """Whether requests are taken: engines have started and no update is under way."""
        return self._steady.is_set()

    def aim(self, version: Version, source: str) -> None:
        """Bring the engines to ``version``, which ``source`` serves; a newer aim replaces an older one."""
        if version > self.version and (self._target is None or version > self._target[0]):
            self._target = (version, source)
            self._aimed.set()

    def on_update(self, listener: OnUpdate) -> Callable[[], None]:
        """Call ``listener`` after each update, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def keep_current(self) -> None:
        """Update whenever there is something newer; runs for ever.

        An update that fails is repeated once, unless there is something newer still. Raises EngineError where
        that fails too.
        """
        failed: Version | None = None
        while True:
            await self._aimed.wait()
            self._aimed.clear()
            version, source = self._target
            self._steady.clear()
            began = time.monotonic()
            try:
                await self._update(version, source)
            except Exception:
                if version == failed == self._target[0]:
                    raise
                log.warning("the update to %s failed; another try follows", version, exc_info=True)
                failed = version
                await asyncio.sleep(RETRY_AFTER)
                self._aimed.set()
                continue
            self.version = version
            self._steady.set()
            async with self._updated:
                self._updated.notify_all()
            for listener in self._listeners:
                listener(version, time.monotonic() - began)

    async def holding(self, version: Version, within: float) -> None:
        """Wait until all engines hold ``version`` or newer.

        Raises OrchestratorError after ``within`` seconds.
        """
        try:
            async with asyncio.timeout(within), self._updated:
                await self._updated.wait_for(lambda: self.version >= version)
        except TimeoutError:
            raise OrchestratorError(
                f"the engines hold {self.version} and did not get {version} within {within:.0f} s; "
                "see the logs of the trainer and the engines"
            ) from None

    @asynccontextmanager
    async def serving(self, group: int) -> AsyncIterator[Generate]:
        """A place on the group's engine, for one rollout."""
        place = group % len(self._engines)
        async with self._slots[place]:
            yield partial(self._generate, self._engines[place])

    async def _update(self, version: Version, source: str) -> None:
        kv, limit = self._weights.kv, self._weights.timeout
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.update(version, source, kv, limit))

    async def _generate(
        self,
        engine: Engine,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: int,
        request: str,
    ) -> Generation:
        """Sample an answer. None begins during an update, so that its cache salt names the right version."""
        await self._steady.wait()
        with self.busy:
            generation = await engine.generate(
                tokens,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                salt=str(self.version),
                stop_token_ids=[stop],
                request_id=f"{request}-{next(self._requests)}",
            )
        self.generated += len(generation.tokens)
        return generation


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
