"""The place of a rollout on an engine, and on another one when that engine is lost or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from stackrl.runtime.inference.client import EngineLost

if TYPE_CHECKING:
    from stackrl.runtime.inference.answers import Generation
    from stackrl.runtime.orchestrator.engine_life import EngineLife
    from stackrl.runtime.orchestrator.engines import Generate

log = logging.getLogger(__name__)


class Seat:
    """Gives the answers of one rollout, one after the other. Use it as a context.

    An engine that is to leave is left between two answers. Where one is lost in the middle of an answer, the
    answers before it stay what they are, and whoever asked may `move` and ask again.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[EngineLife]],
        generate: Callable[..., Awaitable[Generation]],
    ) -> None:
        """``find``: the engine to go to, once there is one; ``generate``: asks the engine it is given."""
        self._find, self._generate = find, generate
        self._place = AsyncExitStack()
        self.losses = 0
        """Engines that were lost and left so far."""

    async def __aenter__(self) -> Seat:
        await self._take()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises EngineLost in the place of another error whose cause is the engine."""
        try:
            if isinstance(error, Exception):
                await self._life.check()
        finally:
            await self._place.aclose()

    async def __call__(self, tokens: Sequence[int], **request: Any) -> Generation:
        """As Generate. Raises EngineLost, and EngineError for what is not the engine's end."""
        if self._life.leaving:
            await self._change()
        return await self._generate(self._life, tokens, **request)

    async def move(self) -> None:
        """Leave an engine that gave no answer; each engine's own limit bounds the wait for another one.

        One that only the connection was lost to may be the next one too.
        """
        self.losses += 1
        with contextlib.suppress(EngineLost):
            await self._life.check()
        await self._change()

    async def _change(self) -> None:
        await self._place.aclose()
        await self._take()

    async def _take(self) -> None:
        while True:
            self._life = await self._find()
            await self._place.enter_async_context(self._life.slots)
            if await self._life.serves() and not self._life.leaving:
                return
            await self._place.aclose()


class Asking:
    """The Generate of a rollout that may take ``limit``: an answer that was lost with its engine is asked for
    again elsewhere, and neither it nor the wait takes any of the rollout's time."""

    def __init__(self, generate: Generate, limit: asyncio.Timeout, *, at_leisure: bool, losses: int) -> None:
        """``at_leisure``: answers take none of the time; ``losses``: how many engines may be lost."""
        self._generate, self._limit, self._at_leisure = generate, limit, at_leisure
        self._losses_left = losses

    async def __call__(self, tokens: Sequence[int], **options: Any) -> Generation:
        left = self._limit.when() - _now()
        try:
            if self._at_leisure:
                self._end_in(None)
            while True:
                try:
                    return await self._generate(tokens, **options)
                except EngineLost as error:
                    if not isinstance(self._generate, Seat) or self._losses_left == 0:
                        raise
                    self._losses_left -= 1
                    log.warning("answer %s is asked for again: %s", options.get("request"), error)
                    self._end_in(None)
                    await self._generate.move()
                    if not self._at_leisure:
                        self._end_in(left)
        finally:
            if self._at_leisure:
                self._end_in(left)

    def _end_in(self, seconds: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the rollout has ended meanwhile
            self._limit.reschedule(None if seconds is None else _now() + seconds)


def _now() -> float:
    return asyncio.get_running_loop().time()
