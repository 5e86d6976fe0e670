"""The program of a process that calls functions of the user's own (see functions.py).

What it reads are pickles, each behind its length: first its settings, then one call after the other. What it
writes are lines of JSON: ``{"ready": true}`` or ``{"refused": why}``; for each call ``{"call": n, ...}`` with
``value``, ``late`` or ``problem``; and every now and then ``{}``, from the thread that all calls go through:
its silence tells that nothing goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

BEAT_EVERY = 0.5
"""Seconds."""
THREADS = 32
"""Calls of plain functions at a time; the wait for one of them is not the function's time."""
_LENGTH = 8


def framed(message: Any) -> bytes:
    """As the program reads it."""
    content = pickle.dumps(message)
    return len(content).to_bytes(_LENGTH, "big") + content


def main() -> None:
    """What functions print goes where this process's errors go, and they find nothing to read."""
    asked, told = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    settings = _next(asked)
    if settings is None:
        return
    sys.path[:] = settings["path"]
    from stackrl.runtime.processes import die_with

    die_with(settings["parent"])
    answer = _Answer(told)
    try:
        from stackrl.runtime.own_code import load

        functions = {path: load(path, settings["group"]) for path in settings["functions"]}
    except BaseException as error:  # whatever is wrong with it: its calls fail, and say why
        answer(refused=str(error) or repr(error))
        return
    answer(ready=True)
    asyncio.run(_serve(asked, answer, functions, settings["limit"]))


async def _serve(
    asked: BinaryIO, answer: _Answer, functions: Mapping[str, Callable[..., Any]], limit: float
) -> None:
    """Until there is nobody who asks."""
    loop, room, calls = asyncio.get_running_loop(), asyncio.Semaphore(THREADS), set()

    def begin(number: int, path: str, text: str, row: Any) -> None:
        task = asyncio.create_task(_called(functions[path], text, row, limit, room))
        calls.add(task)
        task.add_done_callback(lambda done: (calls.discard(done), answer(call=number, **done.result())))

    def listen() -> None:
        while (message := _next(asked)) is not None:
            loop.call_soon_threadsafe(begin, *message)
        os._exit(0)  # whatever still runs

    threading.Thread(target=listen, daemon=True).start()
    while True:
        await asyncio.sleep(BEAT_EVERY)
        answer()


async def _called(
    function: Callable[..., Any], text: str, row: Any, limit: float, room: asyncio.Semaphore
) -> dict[str, Any]:
    """What there is to tell of one call."""
    from stackrl.runtime.environments.limited import Late, called

    try:
        if inspect.iscoroutinefunction(function):
            value = await called(function, text, row, limit=limit, name="it")
        else:
            async with room:
                value = await called(function, text, row, limit=limit, name="it")
    except Late:
        return {"late": True}
    except BaseException as error:  # SystemExit, too: it is of the function, not of ours
        return {"problem": f"raised {type(error).__name__}: {error}{_place(error)}"}
    if not isinstance(value, numbers.Real):
        return {"problem": f"returned {value!r:.60}, not a number"}
    return {"value": float(value)}


class _Answer:
    """Writes lines, from the one thread that there is for it."""

    def __init__(self, told: BinaryIO) -> None:
        self._told = told

    def __call__(self, **message: Any) -> None:
        try:
            self._told.write(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # nobody reads it


def _next(asked: BinaryIO) -> Any:
    """The next message; None where there is none any more."""
    length = asked.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    content = asked.read(int.from_bytes(length, "big"))
    return pickle.loads(content)


def _place(error: BaseException) -> str:
    """Where it was raised, if that was in a file."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(__file__)
    theirs = [frame for frame in frames if os.path.dirname(frame.filename) != ours]
    return f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""


if __name__ == "__main__":
    main()
