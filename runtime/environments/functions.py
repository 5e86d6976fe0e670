"""Functions of the user's own, called in processes that may be ended.

A regular expression that never comes to an end keeps Python's lock: no other thread of its process goes on,
and no thread can be ended. So none of these functions runs in the process that asks. Each of a few processes
runs many calls at once. Where one of them stops the others, the process is ended, and each of its calls is
done once more, in a process for itself, which tells whose fault it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from stackrl.runtime.environments.function_program import framed
from stackrl.runtime.processes import signal_name
from stackrl.runtime.run import TOKEN_VARIABLE

PROGRAM = Path(__file__).with_name("function_program.py")
PROCESSES = min(4, os.cpu_count() or 1)
START_LIMIT = 120.0
"""Seconds for a process to have imported the functions."""
GRACE = 5.0
"""Seconds of silence, besides those that a call may take, after which a process is blocked."""


class FunctionError(Exception):
    """A call that gave no number. The text names the function and says why."""


class Functions:
    """Calls some functions `f(answer, row)`. Its processes start when they are needed, and end with it."""

    def __init__(self, paths: Sequence[str], group: str, limit: float, search: Sequence[str]) -> None:
        """``paths``: as own_code.load takes them; ``limit``: seconds of a call; ``search``: sys.path."""
        self._limit = limit
        self._settings = {"functions": paths, "group": group, "limit": limit, "path": list(search)}
        self._settings["folder"] = os.getcwd()
        self._choosing = threading.Lock()
        self._processes: list[_Process] = []
        self._idle: list[_Process] = []
        """Processes for one call at a time."""
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._rooms = weakref.WeakKeyDictionary()
        """How many calls may have a process for themselves, by the event loop that waits for it."""
        weakref.finalize(self, _end_all, (self._processes, self._idle))

    async def call(self, path: str, answer: str, row: Any, name: str) -> float:
        """What the function ``path`` gives; it gets a copy of ``row``. ``name`` is for errors.

        Raises FunctionError, and TimeoutError where it takes too long.
        """
        try:
            try:
                return await asyncio.wrap_future(self._shared().call(path, answer, row))
            except _Lost as lost:
                if lost.fault:
                    raise
            return await self._alone(path, answer, row)
        except _Late:
            raise TimeoutError(f"{name} took over {self._limit:g} s") from None
        except _Lost as lost:
            raise FunctionError(f"{name} {lost}") from None
        except FunctionError as error:
            raise FunctionError(f"{name} {error}") from None

    def _shared(self) -> _Process:
        """The process with the fewest calls; one more where all have some."""
        with self._choosing:
            usable = [process for process in self._processes if process.usable]
            if len(usable) < PROCESSES and all(process.load for process in usable):
                usable.append(_Process(self._settings))
            self._processes[:] = usable
            return min(usable, key=lambda process: process.load)

    async def _alone(self, path: str, answer: str, row: Any) -> float:
        loop = asyncio.get_running_loop()
        async with self._rooms.setdefault(loop, asyncio.Semaphore(PROCESSES)):
            with self._choosing:
                self._idle[:] = [process for process in self._idle if process.usable]
                process = self._idle.pop() if self._idle else _Process(self._settings)
            try:
                return await asyncio.wrap_future(process.call(path, answer, row))
            finally:
                if process.usable and not process.load:
                    with self._choosing:
                        self._idle.append(process)
                else:
                    process.end()


@lru_cache(maxsize=8)
def _functions(
    paths: tuple[str, ...], group: str, limit: float, search: tuple[str, ...], _: str
) -> Functions:
    return Functions(paths, group, limit, search)


def functions(paths: Iterable[str], group: str, limit: float) -> Functions:
    """Those of ``paths``, seen from the work directory: one pool for all environments that name the same."""
    return _functions(tuple(paths), group, limit, tuple(sys.path), os.getcwd())


class _Late(Exception):
    """A call took longer than it may."""


class _Lost(Exception):
    """The process of a call ended. ``fault``: through that call, for it had no other."""

    def __init__(self, what: str, fault: bool) -> None:
        super().__init__(what)
        self.fault = fault


class _Process:
    """One process, and the calls that it has. They may come from any thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._calls: dict[int, Future[float]] = {}
        self._numbers = itertools.count()
        self._changing = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = ""
        self._over = self._left_behind = False
        threading.Thread(target=self._run, name="functions", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether it takes calls: not where one that took too long may still run in it."""
        return not (self._over or self._left_behind)

    @property
    def load(self) -> int:
        return len(self._calls)

    def call(self, path: str, answer: str, row: Any) -> Future[float]:
        """Its number; FunctionError, _Late or _Lost."""
        future: Future[float] = Future()
        with self._changing:
            if self._over:
                future.set_exception(_Lost("found no process to run in", fault=False))
                return future
            number = next(self._numbers)
            self._calls[number] = future
        self._outbox.put(framed((number, path, answer, row)))
        return future

    def end(self) -> None:
        """End it with all that it started; its calls are lost."""
        with self._changing:
            self._over = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self) -> None:
        """Start it and take what it says; a thread of its own, as the process dies with the one it is of."""
        try:
            self._start()
            how = self._listen()
        except Exception as error:
            how = f"found no process to run in: {type(error).__name__}: {error}"
        self.end()
        self._outbox.put(None)
        if self._process is not None:
            code = self._process.wait()
            how = how or f"ended its process ({signal_name(-code) if code < 0 else f'exit code {code}'})"
        self._leave(how)

    def _start(self) -> None:
        with self._changing:
            if self._over:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=self._settings["folder"],
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            )
        threading.Thread(target=self._write, name="functions", daemon=True).start()

    def _write(self) -> None:
        """What is asked, which a process that blocks does not read."""
        pipe = self._process.stdin
        with contextlib.suppress(OSError), pipe:
            message = framed({**self._settings, "parent": os.getpid()})
            while message is not None:
                sent = 0
                while sent < len(message):
                    sent += pipe.write(message[sent:])
                message = self._outbox.get()

    def _listen(self) -> str:
        """Until it ends or blocks. What calls that are left did then; empty where its exit code tells."""
        if self._process is None:
            return "was ended"
        pipe, text, patience = self._process.stdout, b"", START_LIMIT
        ready = select.poll()  # unlike select() it takes files of any number
        ready.register(pipe, select.POLLIN)
        with pipe:
            while True:
                if not ready.poll(patience * 1000):
                    return _BLOCKED if patience < START_LIMIT else f"was not imported within {patience:g} s"
                part = os.read(pipe.fileno(), 65536)
                if not part:
                    return ""
                *lines, text = (text + part).split(b"\n")
                for message in map(json.loads, lines):
                    self._take(message)
                    patience = self._settings["limit"] + GRACE

    def _take(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            self._refused = message["refused"]
        if "call" not in message:
            return
        with self._changing:
            self._left_behind = self._left_behind or "late" in message
            future = self._calls.pop(message["call"])
            last = self._left_behind and not self._calls
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            if "value" in message:
                future.set_result(message["value"])
            else:
                future.set_exception(_Late() if "late" in message else FunctionError(message["problem"]))
        if last:
            self.end()

    def _leave(self, how: str) -> None:
        with self._changing:
            calls, self._calls = list(self._calls.values()), {}
        fault = len(calls) == 1 and not self._left_behind
        for future in calls:
            with contextlib.suppress(InvalidStateError):
                if self._refused:
                    future.set_exception(FunctionError(f"cannot be called: {self._refused}"))
                else:
                    future.set_exception(_Late() if fault and how == _BLOCKED else _Lost(how, fault))


_BLOCKED = "blocked its process"


def _end_all(lists: Iterable[list[_Process]]) -> None:
    for process in itertools.chain(*lists):
        process.end()
