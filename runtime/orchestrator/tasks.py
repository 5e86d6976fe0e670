"""Which tasks a stage draws: environments by weight, tasks by the seed tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def choose(self, *number: int, shares: Mapping[str, float] | None = None) -> str:
        """The environment of a prompt, by ``shares`` instead of the weights where they are given."""
        rng = self._seeds.branch("prompt", *number).branch("environment").rng()
        weights = self._weights if shares is None else [shares[name] for name in self._environments]
        [name] = rng.choices(list(self._environments), weights)
        return name

    def draw(self, *number: int, environment: str | None = None) -> Draw:
        """The task of a prompt, which several numbers may name; from the environment that it chooses."""
        seeds = self._seeds.branch("prompt", *number)
        name = self.choose(*number) if environment is None else environment
        chosen = self._environments[name]
        return Draw(name, chosen, chosen.task(seeds.branch("task").rng()), seeds)
