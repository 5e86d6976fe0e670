"""``python killed_orchestrator.py RUN_DIR POINT STEP``: an orchestrator with a fake engine that ends itself
with SIGKILL when it reaches a point of optimizer step STEP, as no process that cleans up would.

POINT is one of POINTS; `none` runs to the end, as the orchestrator's own program does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from fake_engine import FakeEngine
from small_runs import reversed_badly

from stackrl.runtime import checkpoints
from stackrl.runtime.orchestrator import __main__ as program
from stackrl.runtime.orchestrator import evaluation, saving
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.recorder import Recorder
from stackrl.runtime.orchestrator.saving import Saving
from stackrl.runtime.transport.batches import BatchServer

IN_HAND = 0.4
"""Seconds after the offer at which the trainer, which is slower, has a batch and has not applied it."""


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon(*_: object) -> None:
    asyncio.get_running_loop().call_later(IN_HAND, die)


def call(
    owner: Any,
    name: str,
    step_of: Callable[..., int],
    *,
    before: bool = False,
    then: Callable[..., None] = die,
) -> Callable[[int], None]:
    """A point: before or after the call of ``owner.name`` whose arguments say the step."""

    def arm(step: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            here = step_of(*arguments, **options) == step
            if here and before:
                then()
            result = original(*arguments, **options)
            if here and not before and not inspect.isawaitable(result):
                then()
            return result

        @functools.wraps(original)
        async def wrapped_coroutine(*arguments: Any, **options: Any) -> Any:
            result = await original(*arguments, **options)
            if step_of(*arguments, **options) == step:
                then()
            return result

        setattr(owner, name, wrapped_coroutine if inspect.iscoroutinefunction(original) else wrapped)

    return arm


def _index_of_checkpoint(checkpoint: Any, facts: dict[str, Any]) -> int:
    return facts["index"] - 1


POINTS: dict[str, Callable[[int], None]] = {
    "sealed": call(Journal, "seal", lambda journal, place, *more, **options: place.index),
    "taken": call(BatchServer, "offer", lambda server, batches: batches[0].index, then=die_soon),
    "acknowledged": call(Journal, "apply", lambda journal, index: index, before=True),
    "applied": call(Journal, "apply", lambda journal, index: index),
    "told": call(Recorder, "stepped", lambda recorder, record: record["index"]),
    "cutting": call(Journal, "snapshot", lambda journal, path: int(path.parent.parent.name[5:]) - 1),
    "cut": call(Saving, "cut", lambda saving, index: index - 1),
    "declared": call(checkpoints, "write_manifest", _index_of_checkpoint),
    "durable": call(Journal, "make_durable", lambda journal, index: index),
}


def main() -> int:
    run, point, step = sys.argv[1:]
    assert saving.checkpoints is checkpoints
    evaluation.PROMPTS = 8
    program._engines = lambda *_: [FakeEngine(reversed_badly)]
    if point != "none":
        POINTS[point](int(step))
    sys.argv[1:] = [run]
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
