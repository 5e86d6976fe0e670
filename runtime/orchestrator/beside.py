"""Functions of the user that compute beside the event loop, within a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def beside(seconds: float, function: Callable[..., Result], *arguments: object) -> Result:
    """What ``function`` gives. Raises TimeoutError after ``seconds``; what it does then keeps nobody waiting.

    Its thread is its own: those of asyncio.to_thread would keep the process from ending.
    """
    future: Future[Result] = Future()

    def compute() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=compute, name=getattr(function, "__name__", "beside"), daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(future)
