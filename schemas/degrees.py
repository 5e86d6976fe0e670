"""How the trainer's ranks divide the work: what the stack says, and what follows where it says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from stackrl.schemas.model import RandomModel
from stackrl.schemas.shapes import EXPERT_COUNTS, experts_in, shape_of
from stackrl.schemas.stack import Stack


@dataclass(frozen=True)
class Degrees:
    """ranks = replicate × shard × context; a layer's experts are shared by ``expert`` of shard × context."""

    ranks: int
    replicate: int = 1
    """Copies of the sharded model."""
    shard: int = 1
    """Ranks with different micro-batches that share one copy of the model."""
    context: int = 1
    """Ranks that share each micro-batch, and the copy of the model with those others."""
    expert: int = 1


def degrees_of(stack: Stack, ranks: int) -> Degrees:
    """For ``ranks`` ranks. Left out, the model is not replicated, micro-batches are not shared, and experts
    are shared by as many ranks as divide both their number and the ranks of one copy of the model.

    Degrees that do not divide (see rules.degrees_divide) are taken as they are said.
    """
    said = stack.trainer.parallel
    replicate, context = said.replicate or 1, said.context or 1
    copy = max(ranks // replicate, 1)
    expert = said.expert or gcd(experts_of(stack) or 1, copy)
    return Degrees(ranks, replicate, max(copy // context, 1), context, expert)


def experts_of(stack: Stack) -> int | None:
    """Experts of each layer that has any; None where there are none, or nothing says so.

    What only this machine's cache knows does not count: every node has to find the same.
    """
    if isinstance(stack.model, RandomModel):
        said = next((count for key in EXPERT_COUNTS if (count := stack.model.config.get(key))), None)
        if said:  # whatever else of the config may be wrong
            return said
    known = shape_of(stack.model, cached=False)
    return known and experts_in(known.shape)
