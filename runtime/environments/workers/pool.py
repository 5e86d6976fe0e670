"""The worker processes of an environment: they start when they are needed, and are replaced when lost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any
from weakref import WeakKeyDictionary

from stackrl.runtime.environments.workers.parties import Program, WholePolicy, WorkerRefused
from stackrl.runtime.environments.workers.worker import START_LIMIT, Worker

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between a start that failed and the next; doubled each time."""
PATIENCE = 240.0
"""Seconds for which starts that fail are tried again while somebody waits for a worker; a machine may lack
something for a while."""
LONGEST_WAIT = PATIENCE + LONGEST_PAUSE + START_LIMIT
"""Seconds for which `Pool.ready` waits at most."""

log = logging.getLogger(__name__)


class Pool:
    """Up to ``size`` workers of one program, with many rollouts at once in each."""

    def __init__(self, program: Program, size: int) -> None:
        self._program, self._size = program, size
        self._workers: list[Worker] = []
        self._starting: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._places: dict[int, asyncio.Semaphore] = {}

    def places(self, at_once: int) -> asyncio.Semaphore:
        """Those of rollouts where each worker has ``at_once``."""
        return self._places.setdefault(at_once, asyncio.Semaphore(at_once * self._size))

    async def ready(self) -> None:
        """Wait until a worker is. Raises WorkerRefused where none can be started for so long as PATIENCE, or
        where the stack is at fault."""
        until = time.monotonic() + PATIENCE
        while not self._alive():
            try:
                await self._start()
            except WorkerRefused as error:
                if error.key or time.monotonic() >= until:
                    raise

    async def rollout(self, number: int, policy: WholePolicy) -> dict[str, Any]:
        """As Worker.rollout, in the worker that has the fewest."""
        await self.ready()
        alive = self._alive()
        if len(alive) < self._size and all(worker.load for worker in alive):
            self._begin()
        return await min(alive, key=lambda worker: worker.load).rollout(number, policy)

    async def close(self) -> None:
        """End all workers and what they started."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.alive]

    async def _start(self) -> None:
        await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        """The start of one more worker, which all share who wait for one."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_one())
            self._starting.add_done_callback(_seen)
        return self._starting

    async def _start_one(self) -> None:
        await asyncio.sleep(self._pause)
        for worker in [worker for worker in self._workers if not worker.alive]:
            await worker.close()
            self._workers.remove(worker)
        try:
            worker = await Worker.start(self._program)
        except WorkerRefused as error:
            self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
            log.warning("environment %s: a worker did not start: %s", self._program.name, error)
            raise
        self._pause = 0.0
        self._workers.append(worker)


_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Pool]] = WeakKeyDictionary()
"""Of each event loop, by what they run: an environment that several stages have is started once."""


def pool_of(program: Program, size: int) -> Pool:
    """The pool of this event loop that runs ``program``."""
    pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps([str(program.adapter), program.settings, program.interpreter, size], sort_keys=True)
    return pools.setdefault(key, Pool(program, size))


async def close_workers() -> None:
    """End the workers of all environments of this event loop."""
    pools = _POOLS.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(pool.close() for pool in pools.values()))


def _seen(start: asyncio.Task[None]) -> None:
    """A start that nobody waited for is tried again when it is needed."""
    if not start.cancelled():
        start.exception()
