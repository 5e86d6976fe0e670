"""Prompts are prefilled on one engine and answered on another, both with weights of one version.

A decode engine takes the turn; the prompt's keys come from a prefill engine that holds the same version.
While they are on their way neither of the two is updated (docs/weights.md has the rule).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stackrl.runtime.inference.answers import Generation
from stackrl.runtime.inference.client import EngineError, EngineLost
from stackrl.runtime.orchestrator.engine_life import EngineLife, Status
from stackrl.runtime.orchestrator.errors import OrchestratorError

TRIES = 8
"""Prefills of one prompt before its turn has failed."""
HOME = 4
"""Prompts more than another engine that one may have under way which has cached the group's prompt."""
PROOF = 16
"""Turns after which keys must have moved to an engine."""

log = logging.getLogger(__name__)


class Prefills:
    """The prefill engines of a run, and the way from them to the decode engines."""

    def __init__(
        self,
        lives: Callable[[], Sequence[EngineLife]],
        change: Callable[[], Awaitable[None]],
    ) -> None:
        """``lives``: the prefill engines there are now; ``change`` waits until the status of any engine is
        another one."""
        self._lives, self._change = lives, change
        self._unproven: Counter[EngineLife] = Counter()
        """Turns of each decode engine that has not been seen to fetch keys."""
        self._proven: set[EngineLife] = set()
        self.repeated = 0
        """Prefills that no answer came of: an engine failed, or was to be updated."""

    async def generate(
        self, decode: EngineLife, group: int, tokens: Sequence[int], *, request_id: str, **request: Any
    ) -> Generation:
        """As EngineLife.generate of ``decode``, with the prompt's keys from a prefill engine.

        Raises EngineLost where ``decode`` is lost, EngineError where prompt and answer do not come together,
        and OrchestratorError where keys never move.
        """
        for attempt in range(TRIES):
            prefill, name = await self._choose(decode, group), f"{request_id}-{attempt}"
            try:
                generation = await self._turn(prefill, decode, tokens, name, request)
            except EngineError as error:
                await decode.check()
                with contextlib.suppress(EngineLost):
                    await prefill.check()
                reason = str(error)
            except _GivenUp as error:
                reason = str(error)
            else:
                await self._prove(decode)
                return generation
            self.repeated += 1
            log.warning("the prompt of %s is prefilled again: %s", request_id, reason)
        raise EngineError(f"the prompt of {request_id} was prefilled {TRIES} times in vain: {reason}")

    async def _choose(self, decode: EngineLife, group: int) -> EngineLife:
        """The prefill engine that has the group's prompt, unless it has much more to do than another one.

        Each engine's own limit bounds the wait. Raises EngineLost where ``decode`` is lost.
        """
        while True:
            if not await decode.serves():
                await decode.check()
            lives = self._lives()
            fitting = [place for place, life in enumerate(lives) if _together(life, decode)]
            if fitting:
                home = group % len(lives)
                loads = {place: len(lives[place].transfers) - HOME * (place == home) for place in fitting}
                return lives[min(fitting, key=lambda place: (loads[place], (place - home) % len(lives)))]
            await self._change()

    async def _turn(
        self,
        prefill: EngineLife,
        decode: EngineLife,
        tokens: Sequence[int],
        name: str,
        request: Mapping[str, Any],
    ) -> Generation:
        """Raises _GivenUp where the prompt's keys were not fetched in time, and EngineError."""
        scope = asyncio.timeout(None)

        def arrived() -> None:
            for life in (prefill, decode):
                life.transfers.end(scope)

        try:
            async with scope:
                async with prefill.slots:
                    if not _together(prefill, decode):
                        raise _GivenUp("an engine was to be updated before its turn came")
                    for life in (prefill, decode):
                        life.transfers.begin(scope)
                    prefilled = await prefill.prefill(tokens, request_id=name)
                if prefilled.version != decode.version:
                    raise _GivenUp(f"{prefill.client.url} prefilled it with {prefilled.version}")
                return await decode.generate(
                    tokens, prefilled=prefilled, on_first_token=arrived, request_id=name, **request
                )
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise _GivenUp(
                f"its keys did not get from {prefill.client.url} to {decode.client.url}"
            ) from error
        finally:
            arrived()

    async def _prove(self, decode: EngineLife) -> None:
        """Raises OrchestratorError where an engine has answered many turns and fetched no keys."""
        if decode in self._proven:
            return
        self._unproven[decode] += 1
        if await decode.client.fetched_bytes() > 0:
            self._proven.add(decode)
        elif self._unproven[decode] >= PROOF:
            raise OrchestratorError(
                f"engine {decode.client.url} has answered {PROOF} prompts and fetched none of their keys "
                "from a prefill engine: it computes them itself, and the split is of no use. "
                "Look for NIXL and UCX in the logs of both engines, and whether one reaches the other's "
                "machine; or use one pool, roles.inference"
            )


class _GivenUp(Exception):
    """The prompt is to be prefilled anew; the text says why."""


def _together(prefill: EngineLife, decode: EngineLife) -> bool:
    """Whether both take requests, with the same weights."""
    serving = prefill.status == decode.status == Status.SERVING
    return serving and prefill.version == decode.version
