"""A rule over how many rollouts an engine has at once. schemas/rules.py registers it."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.problems import Problem, at
from stackrl.schemas.stack import Stack


def rollouts_find_room(stack: Stack) -> Iterator[Problem]:
    """A rollout that an engine would only queue waits in the orchestrator, where its time stands still."""
    inference = stack.inference
    if inference.concurrency != "adaptive" and inference.concurrency > inference.max_requests:
        what = f"an engine runs {inference.max_requests} requests at once (inference.max_requests)"
        yield Problem(at("inference", "concurrency"), what, "lower it, or raise max_requests")
