"""A process in which the event loop comes first.

Two things keep a loop waiting that has thousands of rollouts to look after, whatever its own code does:
threads that compute (replies of environments, the journal), and the garbage collector.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

_SWITCH_SECONDS = 0.0005
"""For which another thread may keep the loop from going on. Python's 5 ms pass several times in a turn."""
_COLLECT_EVERY = 0.25
"""Seconds. What has been made in them and still lives is looked through in a few milliseconds."""
_ALL_EVERY = 600.0
"""Seconds. To look through all that 40,000 rollouts hold, 800,000 objects, takes 0.4 s and more."""


def put_the_loop_first() -> None:
    """Call it once, before the loop and after everything is imported."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # modules live as long as the process


async def collect_garbage() -> None:
    """Take over from Python's collector, for ever.

    It goes by how many more objects were made than went. Where as many go as come, it waits until most of
    what lives is new to it, and then looks through hundreds of thousands in one go. Here, what was made since
    the last time is looked through often, and what outlives that is left alone for long.
    """
    gc.disable()
    try:
        while True:
            until = time.monotonic() + _ALL_EVERY
            while time.monotonic() < until:
                await asyncio.sleep(_COLLECT_EVERY)
                gc.collect(0)
                gc.freeze()
            gc.unfreeze()
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
