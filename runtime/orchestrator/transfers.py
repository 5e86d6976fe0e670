"""Prompts on their way from a prefill engine to a decode engine, as one of the two engines counts them."""

from __future__ import annotations

import asyncio
import contextlib


class Transfers:
    """Each is a scope that ends it. An engine's weights change when there are none.

    A prefill engine does not stand still for an update before its keys are fetched, and a decode engine that
    stands still fetches none: without this, two that are updated at once would wait for each other.
    """

    def __init__(self) -> None:
        self._under_way: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, scope: asyncio.Timeout) -> None:
        self._under_way.add(scope)
        self._none.clear()

    def end(self, scope: asyncio.Timeout) -> None:
        """The keys have arrived, or nobody wants them any more. Ending one twice is no fault."""
        self._under_way.discard(scope)
        if not self._under_way:
            self._none.set()

    async def over(self, within: float) -> None:
        """Wait until there are none; those that take more than ``within`` seconds are given up."""
        try:
            async with asyncio.timeout(within):
                await self._none.wait()
        except TimeoutError:
            self.give_up()
            await self._none.wait()

    def give_up(self) -> None:
        """End all; whoever wanted one begins anew."""
        now = asyncio.get_running_loop().time()
        for scope in self._under_way:
            with contextlib.suppress(RuntimeError):  # the other engine has ended it already
                scope.reschedule(now)
