"""Parallel degrees divide the ranks and GPUs that they cut, and what these share."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stackrl.schemas.degrees import experts_of
from stackrl.schemas.pools import gpus_of_engine
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.shapes import heads_divide, shape_of
from stackrl.schemas.split import Task, gpus_of_role, nodes_of_role, roles_of, trainer_ranks
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


def context_divides_heads(stack: Stack) -> Iterator[Problem]:
    """Ranks that share tokens exchange them for heads; models that run through the code of transformers are
    not divided in such ways at all."""
    from stackrl.runtime.trainer.models.families import FAMILIES

    known, parallel = shape_of(stack.model), stack.trainer.parallel
    if known is None:
        return
    for name in ("context", "expert"):
        degree = getattr(parallel, name) or 1
        path = at("trainer", "parallel", name)
        if degree > 1 and known.family not in FAMILIES:
            what = f"{known.family} models run through the code of transformers, which is not divided so"
            yield Problem(path, what, f"remove it, or train a model of {', '.join(FAMILIES)}")
        elif name == "context" and not heads_divide(known.shape, degree):
            fitting = [ranks for ranks in range(2, degree) if heads_divide(known.shape, ranks)]
            mend = f"choose {' or '.join(map(str, fitting[-3:]))}" if fitting else "leave it out"
            yield Problem(path, f"{degree} ranks cannot share the heads of {known.name} evenly", mend)


def engines_fill_their_gpus(stack: Stack, task: Task) -> Iterator[Problem]:
    """Of the engines."""
    for name, role in roles_of(stack):
        if name == "trainer":
            continue
        nodes, width = nodes_of_role(stack, task, name), gpus_of_engine(stack, name)
        gpus = gpus_of_role(stack, task, name) // max(nodes, 1)
        if gpus and gpus % width:
            which = f"the {gpus} GPUs of each node of {name}" if nodes else f"the {gpus} GPUs of {name}"
            what = f"engines of {width} GPUs do not fill {which}"
            if nodes and width > gpus:
                what = f"an engine of {width} GPUs would span nodes of {gpus}, and engines stay on one"
            own = role.tensor_parallel or role.data_parallel > 1
            path = at("roles", name) if own else at("inference", "tensor_parallel")
            yield Problem(path, what, "choose a degree that divides them")
