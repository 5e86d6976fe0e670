"""An engine's own metrics, looked at once a second: they set the number of its rollouts.

Only an engine that serves is looked at: an update or its death is no sign of how full it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from stackrl.runtime.inference.client import Engine, EngineError, EngineLost
from stackrl.runtime.orchestrator.concurrency import Concurrency, Look
from stackrl.runtime.orchestrator.places import Places

if TYPE_CHECKING:
    from stackrl.runtime.inference.engine_metrics import EngineMetrics

LOOK_EVERY = 1.0
"""Seconds between two looks at an engine."""
LOOK_LIMIT = 10.0
"""Seconds within which it answers one; whether it is lost is asked elsewhere."""
_COUNTED = ("preemptions", "prompt_tokens", "prompt_hits", "fetched_tokens", "fetched_bytes")

log = logging.getLogger(__name__)


class Loads:
    """What all engines of a run have done since it was asked last. Engines may come and go meanwhile."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, now: EngineMetrics, before: EngineMetrics, places: int) -> None:
        """Of one look at one engine that has counted on since the look ``before``."""
        self._sums["looks"] += 1
        self._sums["places"] += places
        for gauge in ("cache_use", "running", "queued"):
            self._sums[gauge] += getattr(now, gauge)
        for counter in _COUNTED:
            self._sums[counter] += getattr(now, counter) - getattr(before, counter)

    def lap(self) -> dict[str, float]:
        """As metrics.jsonl has it; nothing where nobody looked."""
        sums, self._sums = self._sums, Counter()
        if not sums["looks"]:
            return {}
        means = {name: sums[name] / sums["looks"] for name in ("cache_use", "running", "queued", "places")}
        record = {f"engines/{name}": mean for name, mean in means.items()}
        record["engines/preemptions"] = sums["preemptions"]
        if sums["prompt_tokens"]:
            record["engines/prefix_hits"] = sums["prompt_hits"] / sums["prompt_tokens"]
        if sums["fetched_bytes"]:
            record["engines/fetched_tokens"] = sums["fetched_tokens"]
            record["engines/fetched_bytes"] = sums["fetched_bytes"]
        return record


class EngineLoad:
    """How busy one engine is, and the places that it has for rollouts."""

    def __init__(self, client: Engine, most: int, adaptive: bool, loads: Loads) -> None:
        """``most`` rollouts at once, or up to so many where it is ``adaptive``."""
        self._client, self._most, self._loads = client, most, loads
        self._concurrency = Concurrency(most) if adaptive else None
        self.places = Places(self._concurrency.limit if self._concurrency else most)
        self._serves = False
        self._before: tuple[float, EngineMetrics] | None = None
        """When it was looked at last, and what was seen; None where its counters may have jumped since."""
        self._silent = False

    def serves(self, serves: bool) -> None:
        """Whether it takes requests, from now on."""
        if not serves and self._concurrency:
            self._concurrency.paused()
        self._serves, self._before = serves, None

    async def watch(self) -> None:
        """Look at it for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if self._serves:
                await self._look()

    async def _look(self) -> None:
        before = self._before
        try:
            now = await self._client.metrics(LOOK_LIMIT)
        except EngineLost:
            self._before = None
            return
        except EngineError as error:
            self._do_without(error)
            return
        if not self._serves or self._before is not before:  # it paused meanwhile
            return
        self._silent, self._before = False, (time.monotonic(), now)
        if before is not None:
            self._seen(before, now)

    def _do_without(self, error: EngineError) -> None:
        """It answers, and tells nothing: it gets all the places that it may have."""
        self.places.limit = self._most
        if not self._silent:
            log.warning("no metrics, so %d rollouts at once: %s", self._most, error)
        self._silent, self._before = True, None

    def _seen(self, before: tuple[float, EngineMetrics], now: EngineMetrics) -> None:
        then, earlier = before
        if now.prompt_tokens < earlier.prompt_tokens:  # another process, which counts from the start
            return
        self._loads.add(now, earlier, self.places.limit)
        if self._concurrency:
            look = Look(
                seconds=time.monotonic() - then,
                cache_use=now.cache_use,
                running=now.running + now.arriving,
                queued=now.queued,
                preempted=now.preemptions - earlier.preemptions,
                taken=self.places.taken,
                lacking=self.places.lacked(),
            )
            self.places.limit = self._concurrency.after(look)
