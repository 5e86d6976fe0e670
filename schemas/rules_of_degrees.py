"""Parallel degrees divide the ranks and GPUs that they cut, and what these share."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stackrl.schemas.degrees import experts_of
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, gpus_of_role, roles_of, trainer_ranks
from stackrl.schemas.stack import Stack


def degrees_divide(stack: Stack, task: Task) -> Iterator[Problem]:
    """Of the trainer."""
    ranks = trainer_ranks(stack, task)
    parallel = stack.trainer.parallel
    for names in (("replicate", "context"), ("replicate", "expert")):
        product = prod(getattr(parallel, name) or 1 for name in names)
        if ranks and ranks % product:
            what = f"{' × '.join(names)} is {product}, which does not divide the trainer's {ranks} ranks"
            yield Problem(at("trainer", "parallel"), what, "choose degrees that divide the ranks")
    experts = experts_of(stack)
    if experts and experts % (parallel.expert or 1):
        what = f"{parallel.expert} ranks cannot share {experts} experts evenly"
        yield Problem(at("trainer", "parallel", "expert"), what, "choose a divisor of their number")


def engines_fill_their_gpus(stack: Stack, task: Task) -> Iterator[Problem]:
    """Of the engines."""
    width = stack.inference.tensor_parallel
    for name, _ in roles_of(stack):
        gpus = gpus_of_role(stack, task, name)
        if name != "trainer" and gpus and gpus % width:
            what = f"engines of {width} GPUs do not fill the {gpus} GPUs of {name}"
            yield Problem(at("inference", "tensor_parallel"), what, "choose a degree that divides them")
