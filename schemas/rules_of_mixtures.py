"""Rules over mixtures of experts. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, device_of
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]


def replay_has_routes(stack: Stack, task: Task) -> Problems:
    """vLLM tells which experts it chose on GPUs alone."""
    if stack.trainer.mixture.router_replay and device_of(stack, task) == "cpu":
        what = "engines on CPUs do not tell which experts they chose"
        yield Problem(at("trainer", "mixture", "router_replay"), what, "remove it, or run on GPUs")
