"""The program of an environment's worker: it runs rollouts, and has the policy answer over a socket.

    python program.py SOCKET

It needs the standard library alone (Python 3.11 or newer), so that an environment can have an interpreter
that stackrl is not installed in. What it runs is an *adapter*: a Python file with a function
``load(settings)`` that gives an object with ``about`` (a dictionary to tell the orchestrator) and
``async rollout(number, policy)``, which takes task ``number`` to its end and gives a dictionary with
``rewards`` and ``metrics``. Where it has an ``async start()``, that is awaited before the first rollout, in
their event loop. An exception is a failed rollout, and one of ``load`` or ``start`` whose ``refusal`` is a
dictionary tells with that why there will be none.

Messages are lines of JSON. The first one names the adapter and holds its settings, and is answered by
``{"ready": about}`` or ``{"refused": why, "mend": how, "key": of the stack}``. Then

    to the worker                              from the worker
    {"rollout": n, "number": task,             {"outcome": n, ...} or {"failed": n, "why": ...}
     "seconds": of it, or null}
    {"answer": a, ...}                         {"ask": a, "rollout": n, ...}
                                               {"forget": a, "rollout": n}, which is not waited for any more
    {"cancel": n}, answered like a rollout
    {"ping": 0}                                {"pong": 0}
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

LONGEST_LINE = 64 << 20
"""Bytes of a message."""
_PR_SET_PDEATHSIG = 1


class NoRoom(Exception):
    """The policy may not write another token."""


class Policy:
    """The model, as one rollout sees it."""

    def __init__(self, worker: Worker, rollout: int, seconds: float | None) -> None:
        self._worker, self._rollout = worker, rollout
        self.seconds = seconds
        """That the whole rollout may take."""

    async def ask(self, **question: Any) -> dict[str, Any]:
        """What the orchestrator answers to ``question``. Raises NoRoom where no answer has room."""
        answer = await self._worker.ask(self._rollout, question)
        if "no_room" in answer:
            raise NoRoom(answer["no_room"])
        return answer


class Worker:
    """One connection to the orchestrator, and the rollouts that it asked for."""

    def __init__(self, adapter: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._adapter, self._reader, self._writer = adapter, reader, writer
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    async def serve(self) -> None:
        """Until the orchestrator closes the connection."""
        self._say(ready=self._adapter.about)
        while line := await self._reader.readline():
            self._take(json.loads(line))

    async def ask(self, rollout: int, question: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._say(ask=number, rollout=rollout, **question)
        try:
            return await answer
        except asyncio.CancelledError:
            self._say(forget=number, rollout=rollout)
            raise
        finally:
            del self._questions[number]

    def _take(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            self._say(pong=message["ping"])
        elif "rollout" in message:
            number = message["rollout"]
            task = self._rollouts[number] = asyncio.create_task(
                self._run(number, message["number"], message.get("seconds"))
            )
            task.add_done_callback(lambda task: self._ended(number, task))
        elif "answer" in message:
            waiting = self._questions.get(message["answer"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif "cancel" in message and (task := self._rollouts.get(message["cancel"])):
            task.cancel()

    async def _run(self, rollout: int, number: int, seconds: float | None) -> None:
        try:
            outcome = await self._adapter.rollout(number, Policy(self, rollout, seconds))
            self._say(outcome=rollout, **outcome)
        except Exception as error:
            self._say(failed=rollout, why=f"{type(error).__name__}: {error}")

    def _ended(self, rollout: int, task: asyncio.Task[None]) -> None:
        """Also one that was cancelled before it began."""
        del self._rollouts[rollout]
        if task.cancelled():
            self._say(failed=rollout, why="it was cancelled")

    def _say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    beginning = json.loads(first_line(connection))
    try:
        adapter = load(beginning["adapter"], beginning["settings"])
    except BaseException as error:
        refuse(connection, error)
    try:
        asyncio.run(serve(adapter, connection))
    finally:
        os.killpg(0, signal.SIGKILL)  # whatever a rollout has left, this process included


def refuse(connection: socket.socket, error: BaseException) -> NoReturn:
    """Tell why there will be no rollouts, and end."""
    refused = getattr(error, "refusal", None) or {"refused": f"{type(error).__name__}: {error}"}
    if not hasattr(error, "refusal"):
        traceback.print_exc()
    connection.sendall(json.dumps(refused).encode() + b"\n")
    raise SystemExit(1) from error


async def serve(adapter: Any, connection: socket.socket) -> None:
    if start := getattr(adapter, "start", None):
        try:
            await start()
        except BaseException as error:
            refuse(connection, error)
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    await Worker(adapter, reader, writer).serve()


def load(adapter: str, settings: dict[str, Any]) -> Any:
    """What the file ``adapter`` makes of ``settings``."""
    spec = importlib.util.spec_from_file_location("stackrl_adapter", adapter)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load(settings)


def first_line(connection: socket.socket) -> bytes:
    """Read by the byte, for what follows is read by the event loop."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise SystemExit("the orchestrator has gone")
        line += byte
    return bytes(line)


def die_with_parent() -> None:
    """Also where the parent is killed and closes nothing."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the orchestrator has gone")


if __name__ == "__main__":
    main()
