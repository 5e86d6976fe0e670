"""A process in which the event loop comes first.

Two things keep a loop waiting that has thousands of rollouts to look after, whatever its own code does:
threads that compute (replies of environments, the journal), and the garbage collector.
"""

from __future__ import annotations

import gc
import sys

_SWITCH_SECONDS = 0.0005
"""For which another thread may keep the loop from going on. Python's 5 ms pass several times in a turn."""
_COLLECT = (10_000, 20, 1000)
"""Most of what thousands of rollouts hold lives long: it is not looked through again and again."""


def put_the_loop_first() -> None:
    """Call it once, before the loop and after everything is imported."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*_COLLECT)
