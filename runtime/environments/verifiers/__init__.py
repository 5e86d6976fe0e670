"""Environments of the Environments Hub: packages for ``verifiers``, led by worker processes of their own."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Policy, Task


class Verifiers(AgentEnvironment):
    """Stands for a package that only its workers can import; workers.in_workers makes it one that runs."""

    schema: ClassVar[dict[str, Any]] = {"type": "object"}

    def __init__(self, **args: Any) -> None:
        """``args`` are the package's; `validate` has its interpreter check them."""

    def task(self, rng: Random) -> Task:
        raise NotImplementedError("tasks of a package are drawn by its workers")

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        raise NotImplementedError("rollouts of a package are led by its workers")
