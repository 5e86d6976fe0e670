"""Which tasks a stage draws: environments by weight, tasks by the seed tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stackrl.runtime.environments import make
from stackrl.runtime.environments.base import Environment, Task
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.schemas import environments as stack


@dataclass(frozen=True)
class Draw:
    """A task, the environment that it is from, and the node of the seed tree that it was drawn at."""

    name: str
    environment: Environment
    task: Task
    seeds: Seeds


class Mix:
    """The environments of a stage. Prompt ``number`` is always the same, whatever else has happened."""

    def __init__(self, environments: Sequence[stack.Environment], seeds: Seeds) -> None:
        self._environments = {environment.name: make(environment) for environment in environments}
        self._weights = [environment.weight for environment in environments]
        self._seeds = seeds

    def draw(self, *number: int) -> Draw:
        """The task of a prompt, which may be named by several numbers."""
        seeds = self._seeds.branch("prompt", *number)
        [name] = seeds.branch("environment").rng().choices(list(self._environments), self._weights)
        environment = self._environments[name]
        return Draw(name, environment, environment.task(seeds.branch("task").rng()), seeds)
