"""Places for the rollouts on one engine: a semaphore whose limit may change while some are taken."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """``async with places:`` waits for a place and holds it; who came first gets the next one.

    Under a limit that was lowered nobody has to leave: places fall away as they are given back.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[asyncio.Future[None]] = deque()
        """Turns in the order in which they came; those that were given up lie here until they are reached."""
        self._lacking = False
        self.taken = 0
        self.waiting = 0

    async def __aenter__(self) -> None:
        if self.taken < self._limit:  # then nobody waits, for a free place is given away at once
            self.taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.waiting += 1
        self._lacking = True
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                self.waiting -= 1
            else:  # it was given a place in the moment in which it was cancelled
                self._give_back()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._give_back()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._fill()

    def lacked(self) -> bool:
        """Whether somebody has had to wait since this was asked last, or waits now."""
        lacked, self._lacking = self._lacking, self.waiting > 0
        return lacked

    def _give_back(self) -> None:
        self.taken -= 1
        self._fill()

    def _fill(self) -> None:
        """Give the free places to those who wait."""
        while self._queue and self.taken < self._limit:
            turn = self._queue.popleft()
            if not turn.done():
                self.waiting -= 1
                self.taken += 1
                turn.set_result(None)
