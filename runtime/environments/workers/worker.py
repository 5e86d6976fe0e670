"""One worker process of an environment, seen from the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import secrets
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackrl.runtime.environments.base import Answer, NoRoom
from stackrl.runtime.environments.workers.parties import (
    EnvironmentFailed,
    Program,
    WholePolicy,
    WorkerLost,
    WorkerRefused,
)
from stackrl.runtime.environments.workers.program import LONGEST_LINE
from stackrl.runtime.processes import adopt_orphans, end_members, members, reap_sandboxed, signal_name

PROGRAM = Path(__file__).with_name("program.py")
START_LIMIT = 300.0
"""Seconds from the start of a worker until it can run rollouts; it loads its data meanwhile."""
SILENCE_LIMIT = 60.0
"""A worker that says nothing for so long is blocked. It answers to every ping otherwise."""
PING_EVERY = 5.0
LEAVE_LIMIT = 150.0
"""Seconds that a rollout has to let go of everything when it is cancelled: to end a command in a sandbox and
to remove that may take a minute each."""
CLOSE_LIMIT = 15.0
"""Seconds for the same where a worker is ended with rollouts in it."""
_MARK = "STACKRL_WORKER"
"""Environment variable that a worker and all that it starts carry."""
_LAST_WORDS = 5

log = logging.getLogger(__name__)


@dataclass
class _Running:
    """A rollout in a worker."""

    policy: WholePolicy
    outcome: asyncio.Future[dict[str, Any]]
    answers: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By the number of the question."""


class Worker:
    """A process and its connection. ``start`` makes one; once it is not ``alive`` it stays so."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._rollouts: dict[int, _Running] = {}
        self._leaving: dict[int, float] = {}
        """Rollouts that were cancelled, and until when they have to be gone."""
        self._numbers = itertools.count()
        self._mark = secrets.token_hex(8)
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._heard = 0.0
        self._lost = ""
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.about: dict[str, Any] = {}

    @classmethod
    async def start(cls, program: Program, within: float | None = None) -> Worker:
        """A worker that is ready for rollouts. Raises WorkerRefused."""
        worker = cls(program)
        try:
            async with asyncio.timeout(within or START_LIMIT):
                await worker._start()
        except BaseException as error:
            await worker.close()
            if isinstance(error, TimeoutError):
                limit = within or START_LIMIT
                raise WorkerRefused(f"its worker was not ready within {limit:g} s{worker._words()}") from None
            raise
        return worker

    @property
    def alive(self) -> bool:
        return not self._lost and not self._closing

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> int:
        """Rollouts that it has."""
        return len(self._rollouts) + len(self._leaving)

    async def rollout(self, number: int, policy: WholePolicy) -> dict[str, Any]:
        """Task ``number`` to its end, with ``policy``.

        Raises WorkerLost, EnvironmentFailed, and whatever ``policy`` raises other than NoRoom.
        """
        if not self.alive:
            raise WorkerLost(self._lost or "it is being ended")
        rollout = next(self._numbers)
        running = self._rollouts[rollout] = _Running(policy, asyncio.get_running_loop().create_future())
        ended = False
        try:
            self._say(rollout=rollout, number=number, seconds=getattr(policy, "seconds", None))
            outcome = await running.outcome
            ended = True
            return outcome
        except EnvironmentFailed:
            ended = True
            raise
        finally:
            del self._rollouts[rollout]
            for answer in list(running.answers.values()):
                answer.cancel()
            if not ended and not self._lost:
                self._leaving[rollout] = asyncio.get_running_loop().time() + LEAVE_LIMIT
                self._say(cancel=rollout)

    async def close(self) -> None:
        """End the process and all that it started; what runs in it may let go of what it holds before."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT):
                await self._empty()
        self._lose("it was ended")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.shield(asyncio.create_task(self._end()))

    async def _empty(self) -> None:
        """Cancel all rollouts and wait until they are gone, or the worker is."""
        for running in self._rollouts.values():
            if not running.outcome.done():
                running.outcome.set_exception(WorkerLost("its worker was ended"))
        while (self._rollouts or self._leaving) and not self._lost:  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(0.02)

    async def _start(self) -> None:
        adopt_orphans()
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._program.interpreter,
                "-P",
                str(PROGRAM),
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=environment_of(self._mark),
            )
        except OSError as error:
            ours.close()
            what = f"{self._program.interpreter} cannot be started: {error.strerror}"
            raise WorkerRefused(what, "name a Python of 3.11 or newer", "python") from error
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        self._background(self._listen_to_words())
        self._say(adapter=str(self._program.adapter), settings=dict(self._program.settings))
        first = json.loads(await self._line() or "{}")
        if "ready" not in first:
            what = first.get("refused") or await self._fate()
            raise WorkerRefused(what, first.get("mend", ""), first.get("key", ""))
        self.about = first["ready"]
        self._heard = asyncio.get_running_loop().time()
        self._background(self._listen())
        self._background(self._watch())

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        try:
            while line := await self._line():
                self._heard = asyncio.get_running_loop().time()
                self._take(json.loads(line))
        except Exception as error:
            self._lose(f"it said what nobody understands: {type(error).__name__}: {error}")
        else:
            self._lose(await self._fate())
        self._background(self._end())

    async def _line(self) -> bytes:
        """The next message; empty where the connection is closed."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""

    def _take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            running = self._rollouts.get(message["rollout"])
            if running is not None:
                ask, task = message["ask"], asyncio.create_task(self._answer(running, message))
                running.answers[ask] = task
                task.add_done_callback(lambda _: running.answers.pop(ask, None))
            return
        if "forget" in message:
            running = self._rollouts.get(message["rollout"])
            if running is not None and (task := running.answers.get(message["forget"])):
                task.cancel()
            return
        rollout = message.get("outcome", message.get("failed"))
        self._leaving.pop(rollout, None)
        running = self._rollouts.get(rollout)
        if running is None or running.outcome.done():
            return
        try:
            if "failed" in message:
                raise EnvironmentFailed(message["why"])
            running.outcome.set_result(_checked(message))
        except EnvironmentFailed as error:
            running.outcome.set_exception(error)

    async def _answer(self, running: _Running, question: dict[str, Any]) -> None:
        ask, policy = question["ask"], running.policy
        try:
            if "history" in question:
                number = await policy.complete(question["history"], question.get("tools", ()))
                said = {"number": number, **_as_data(policy.said(number))}
            else:
                said = _as_data(await policy.answer(*question["messages"]))
        except NoRoom as error:
            said = {"no_room": str(error)}
        except Exception as error:
            if not running.outcome.done():
                running.outcome.set_exception(error)
            return
        self._say(answer=ask, **said)

    async def _watch(self) -> None:
        """Two looks in a row have to find the same: before the first our own loop may have stood still, and
        what the worker said meanwhile, and how it answers to a ping, is only read after it."""
        before = ""
        while not self._lost:
            await asyncio.sleep(PING_EVERY)
            self._say(ping=0)
            found = self._fault()
            if found and found == before:
                self._lose(found)
            before = found
            await asyncio.to_thread(reap_sandboxed)
        self._background(self._end())

    def _fault(self) -> str:
        """What is wrong with the worker at this moment."""
        now = asyncio.get_running_loop().time()
        if now - self._heard > SILENCE_LIMIT:
            return f"it was silent for {SILENCE_LIMIT:g} s: it blocks or hangs"
        if any(until < now for until in self._leaving.values()):
            return f"a cancelled rollout did not let go within {LEAVE_LIMIT:g} s"
        return ""

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = f"the worker of environment {self._program.name!r} was lost: {why}"
        if self._rollouts:
            log.warning("%s; %d rollouts ran in it%s", self._lost, len(self._rollouts), self._words())
        for running in self._rollouts.values():
            if not running.outcome.done():
                running.outcome.set_exception(WorkerLost(self._lost))
        self._leaving.clear()

    async def _fate(self) -> str:
        """What became of the process that closed its connection."""
        try:
            async with asyncio.timeout(5):
                code = await self._process.wait()
        except TimeoutError:
            return f"it closed its connection{self._words()}"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        await asyncio.sleep(0)
        return f"it {how}{self._words()}"

    async def _end(self) -> None:
        await asyncio.to_thread(_end_all, self._process.pid, self._mark)
        await self._process.wait()

    async def _listen_to_words(self) -> None:
        """What it writes goes to our log, and its last lines into errors."""
        stream = self._process.stdout
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than a line is
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._last_words.append(text[-500:])
            log.info("%s: %s", self._program.name, text)

    def _words(self) -> str:
        return f"; its last words: {' | '.join(self._last_words)}" if self._last_words else ""

    def _say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


def environment_of(mark: str) -> dict[str, str]:
    """Our own variables, without the run's token: an environment runs what others wrote."""
    return {name: value for name, value in os.environ.items() if name != "STACKRL_TOKEN"} | {_MARK: mark}


def _end_all(leader: int, mark: str) -> None:
    """Kill ``leader`` and all that it started, wherever it went, and wait for what nobody else waits for."""
    carries = f"{_MARK}={mark}".encode()
    left = members(os.getpid(), leader, carries)
    end_members(os.getpid(), leader, carries)
    for pid in left:
        if pid != leader:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    reap_sandboxed()


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """An outcome whose numbers are numbers. Raises EnvironmentFailed."""
    scores = {name: score for name, (score, _) in message.get("scores", {}).items()}
    for kind, values in (("reward", message.get("rewards", scores)), ("metric", message.get("metrics", {}))):
        for name, value in values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise EnvironmentFailed(f"{kind} {name!r} is {value!r}, which is no number")
    return message


def _as_data(answer: Answer) -> dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": dict(call.arguments), "problem": call.problem}
        for call in answer.calls
    ]
    return {"text": answer.text, "calls": calls, "closed": answer.closed, "thinking": answer.thinking}
