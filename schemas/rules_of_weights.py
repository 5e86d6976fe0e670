"""Rules over how new weights travel. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.base import size_in_bytes
from stackrl.schemas.inference import CollectiveWeights
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, device_of
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]

SMALLEST_BUCKET = 1 << 20


def buckets_are_worth_it(stack: Stack) -> Problems:
    """Each bucket costs a message to every engine."""
    weights = stack.weights
    if isinstance(weights, CollectiveWeights) and size_in_bytes(weights.bucket) < SMALLEST_BUCKET:
        what = f"all engines would have to wait for a message of each {weights.bucket}"
        yield Problem(at("weights", "bucket"), what, "make it 1MiB or more")


def broadcasts_have_their_gpus(stack: Stack, task: Task) -> Problems:
    """NCCL goes from one GPU to others."""
    weights = stack.weights
    if not isinstance(weights, CollectiveWeights) or weights.backend == "gloo":
        return
    if device_of(stack, task) == "cpu":
        if weights.backend:
            yield Problem(
                at("weights", "backend"), "nccl needs GPUs, and the run computes on CPUs", "make it gloo"
            )
    elif stack.roles.inference and stack.roles.inference.share:
        what = "trainer and engine share a GPU, and NCCL wants one for each"
        yield Problem(at("weights", "transport"), what, "make it pull, or say backend: gloo")
