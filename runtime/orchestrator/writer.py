"""A thread that changes the books, so that the event loop does not wait for the disk.

What is asked for while the disk is busy is made together, in one transaction: thousands of rollouts a second
cost as many commits as the disk can do, and each of them is on disk when its caller goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

_MOST_TOGETHER = 64
"""Changes of one transaction; more would keep the first of them waiting."""

Change = Callable[[], None]


class Writer:
    """Makes changes in the order in which they are asked for. Close it."""

    def __init__(self, together: Callable[[], AbstractContextManager[None]]) -> None:
        """``together``: one transaction, on disk when it is left."""
        self._together = together
        self._changes: queue.SimpleQueue[tuple[Change, Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def make(self, change: Change) -> None:
        """Returns when ``change`` is on disk. Raises what it, or another one of its transaction, raises.

        A caller that is cancelled leaves at once; the change is made all the same.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
            self._thread.start()
        made: Future[None] = Future()
        self._changes.put((change, made))
        await asyncio.shield(asyncio.wrap_future(made))

    def close(self) -> None:
        """Wait until everything that was asked for is made."""
        if self._thread is not None:
            self._changes.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (first := self._changes.get()) is not None:
            changes, over = [first], False
            while len(changes) < _MOST_TOGETHER and not self._changes.empty():
                following = self._changes.get()
                if following is None:
                    over = True
                    break
                changes.append(following)
            self._make_together(changes)
            if over:
                return

    def _make_together(self, changes: list[tuple[Change, Future[None]]]) -> None:
        try:
            with self._together() if len(changes) > 1 else contextlib.nullcontext():
                for change, _ in changes:
                    change()
        except BaseException as error:
            for _, made in changes:
                made.set_exception(error)
        else:
            for _, made in changes:
                made.set_result(None)
