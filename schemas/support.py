"""What the language knows and the runtime cannot do yet.

`validate` warns of it; `launch`, `node` and `validate --on-node` refuse it. Nothing is ever ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack

NOT_READ = frozenset({"Roles.prefill", "Roles.decode"})
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
    for pool in ("prefill", "decode"):
        if getattr(stack.roles, pool):
            mend = "use one pool: inference"
            yield Problem(
                at("roles", pool), "separate engines for prefill and decode are not there yet", mend
            )
    if stack.inference.tensor_parallel > 1:
        yield Problem(
            at("inference", "tensor_parallel"), "engines on several GPUs are not there yet", "leave it out"
        )
    if stack.inference.quantization:
        yield Problem(at("inference", "quantization"), "quantised engines are not there yet", "leave it out")
    if stack.weights.transport == "nccl":
        yield Problem(at("weights", "transport"), "nccl is not there yet", "use pull or folder")
