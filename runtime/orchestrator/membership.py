"""Which engines the run has, as the node program writes it down: some join and some leave on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stackrl.runtime.inference.client import Engine
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.progress import Progress
from stackrl.runtime.run import RunFolder
from stackrl.schemas.roles import Pool

LOOK_EVERY = 1.0
"""Seconds."""

Connect = Callable[[str, Pool], Engine]
"""Makes the client of the engine at a URL."""


class Membership:
    """Keeps `engines` those of endpoints.json, and lets the node program know which are still in use."""

    def __init__(self, run: RunFolder, engines: Engines, connect: Connect, progress: Progress) -> None:
        self._run, self._engines, self._connect, self._progress = run, engines, connect, progress
        self._told: list[str] = []

    async def follow(self) -> None:
        """Runs for ever."""
        while True:
            self._tell()
            await asyncio.sleep(LOOK_EVERY)
            self.compare((await asyncio.to_thread(self._run.endpoints)).members)

    def compare(self, members: dict[str, Pool]) -> None:
        """Let those of ``members`` (URL → pool) join that are new, and all others leave."""
        known = self._engines.urls
        for url, pool in members.items():
            if url not in known:
                self._engines.join(self._connect(url, pool))
        for url in known:
            if url not in members:
                self._engines.leave(url)

    def _tell(self) -> None:
        if (used := self._engines.in_use) != self._told:
            self._told = used
            self._progress.uses(used)
