"""Functions of others, called with a limit: one that hangs or blocks stops nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


class Late(TimeoutError):
    """A call took longer than it may."""


async def called(function: Callable[..., Any], *arguments: Any, limit: float, name: str) -> Any:
    """What ``function`` returns, an ``async`` one too. Raises Late after ``limit`` seconds.

    A plain function gets a thread, which lives on where it does not end: Python cannot end a thread. Nor does
    another one go on while a function keeps Python's lock; for functions that may, see functions.py.
    """
    try:
        async with asyncio.timeout(limit) as clock:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            value = await _in_a_thread(function, arguments, name)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise Late(f"{name} took over {limit:g} s") from error


async def _in_a_thread(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Any:
    """Not from a pool: the functions that hang would fill it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except BaseException as raised:  # SystemExit, too: it is of the function, not of ours
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{name} raised {raised!r}")
        if isinstance(error, StopIteration):  # which no future can hold
            error = RuntimeError(f"{name} raised StopIteration")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await result
