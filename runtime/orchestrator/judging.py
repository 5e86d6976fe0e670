"""Environments judge in a thread of their own: one that blocks or hangs does not stop the orchestrator."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from stackrl.runtime.environments.base import Answer, Outcome, Task, TurnEnvironment

BLOCKED_SECONDS = 5.0
"""A thread that has not begun with a reply for so long is left to itself, and a new one takes its place."""

log = logging.getLogger(__name__)


class Judge:
    """Runs replies of environments. A caller that is cancelled leaves at once, whatever the reply does."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reply(self, environment: TurnEnvironment, task: Task, answers: Sequence[Answer]) -> Outcome:
        """As TurnEnvironment.reply, which may still run on when this is cancelled."""
        while True:
            loop = self._loop = self._loop or _loop_in_a_thread()
            reply = _Reply(environment, task, list(answers))
            outcome = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reply.run(), loop))
            try:
                await asyncio.wait([outcome], timeout=BLOCKED_SECONDS)
                if outcome.done() or reply.begun:
                    return await outcome
            except asyncio.CancelledError:
                outcome.cancel()
                if asyncio.current_task().cancelling():
                    raise
                raise RuntimeError("the environment cancelled its own reply") from None
            outcome.cancel()
            if self._loop is loop:
                self._loop = None


class _Reply:
    """One call of an environment, and whether it has begun."""

    def __init__(self, environment: TurnEnvironment, task: Task, answers: list[Answer]) -> None:
        self._environment, self._task, self._answers = environment, task, answers
        self.begun = False

    async def run(self) -> Outcome:
        self.begun = True
        try:
            return await self._environment.reply(self._task, self._answers)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit, which is of the environment: nobody here is to end
            raise RuntimeError(f"the environment raised {error!r}") from error


def _loop_in_a_thread() -> asyncio.AbstractEventLoop:
    """An event loop that runs, and does not keep the process from ending."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_on, args=(loop,), name="environments", daemon=True).start()
    return loop


def _run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` for good: also where a task that an environment left in it ends it by SystemExit."""
    while True:
        try:
            loop.run_forever()
        except BaseException as error:
            log.warning("a task of an environment raised %r", error)
