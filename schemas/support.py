"""What the language knows and the runtime cannot do yet.

`validate` warns of it; `launch`, `node` and `validate --on-node` refuse it. Nothing is ever ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.pools import POOLS
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack

NOT_READ: frozenset[str] = frozenset()
"""Fields that no code of the runtime reads, because what they ask for is listed below."""


def unsupported(stack: Stack, task: Task) -> list[Problem]:
    """Every wish of the stack that this version cannot fulfil."""
    return list(_unsupported(stack, task))


def unsupported_here(task: Task) -> list[Problem]:
    """What only SkyPilot does for a task: without it, nobody would bring these files."""
    mend = "put the files where the run expects them and remove it, or start the stack with `sky launch`"
    return [
        Problem((key,), "nothing is mounted or copied on this machine", mend, at_key=True)
        for key in ("file_mounts", "volumes")
        if task.get(key)
    ]


def _unsupported(stack: Stack, task: Task) -> Iterator[Problem]:
    for key in ("service", "pool"):
        if key in task:
            yield Problem((key,), "this part of SkyPilot is not used by a run", "remove it", at_key=True)
    if stack.roles.prefill and stack.trainer.mixture.router_replay:
        what = "through which experts a prompt went that another engine prefilled is not told yet"
        mend = "use one pool, roles.inference, or leave it out"
        yield Problem(at("trainer", "mixture", "router_replay"), what, mend)
    if stack.inference.tensor_parallel > 1:
        yield Problem(
            at("inference", "tensor_parallel"), "engines on several GPUs are not there yet", "leave it out"
        )
    for pool in POOLS:
        role = getattr(stack.roles, pool)
        for key in ("tensor_parallel", "data_parallel"):
            if role is not None and (getattr(role, key) or 1) > 1:
                what = "engines on several GPUs are not there yet"
                yield Problem(at("roles", pool, key), what, "leave it out")
    if stack.inference.quantization:
        yield Problem(at("inference", "quantization"), "quantised engines are not there yet", "leave it out")
