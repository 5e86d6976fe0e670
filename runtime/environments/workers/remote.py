"""Environments whose rollouts run in worker processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from stackrl.runtime.environments import verifiers
from stackrl.runtime.environments.base import AgentEnvironment, Environment, Outcome, Task, Tool, Turn
from stackrl.runtime.environments.verifiers import Verifiers
from stackrl.runtime.environments.workers.parties import EnvironmentFailed, Program, WholePolicy
from stackrl.runtime.environments.workers.pool import Pool, pool_of
from stackrl.runtime.environments.workers.worker import Worker
from stackrl.schemas import environments as stack


@dataclass(frozen=True)
class Drawn:
    """The number that a worker draws the same task by."""

    number: int


class InWorkers(AgentEnvironment):
    """An AgentEnvironment that is led in one of a pool of processes."""

    def __init__(self, program: Program, workers: int, begins_anew: bool, at_once: int | None = None) -> None:
        """``begins_anew``: whether a rollout does whose worker was lost. ``at_once``: those in a worker."""
        self._program, self._size = program, workers
        self.begins_anew, self._at_once = begins_anew, at_once

    async def try_start(self) -> None:
        """Begin as a worker does, and end. Raises WorkerRefused. Packages have a preflight of their own."""

    def place(self) -> AbstractAsyncContextManager[None]:
        """Of one rollout in a worker; waits until there is one."""
        return nullcontext() if self._at_once is None else self._pool().places(self._at_once)

    async def ready(self) -> None:
        """Wait for a worker. Raises EnvironmentFailed where none can be had."""
        await self._pool().ready()

    def task(self, rng: Random) -> Task:
        return Task((), Drawn(rng.getrandbits(53)))

    async def rollout(self, task: Task, policy: WholePolicy) -> Outcome:
        """Raises WorkerLost, EnvironmentFailed, and what the policy raises."""
        outcome = await self._pool().rollout(task.data.number, policy)
        return self._outcome(outcome, policy)

    def _pool(self) -> Pool:
        return pool_of(self._program, self._size)

    def _outcome(self, outcome: Mapping[str, Any], policy: WholePolicy) -> Outcome:
        return Outcome(rewards=outcome["rewards"], metrics=outcome.get("metrics", {}))


class OursInWorkers(InWorkers):
    """One of our own, which also draws here what it draws there."""

    def __init__(self, inner: AgentEnvironment, described: stack.Environment) -> None:
        settings = {"environment": described.model_dump(mode="json", exclude_unset=True), "path": sys.path}
        program = Program(described.name, Path(__file__).with_name("own.py"), settings, sys.executable)
        at_once = described.at_once or inner.at_once
        super().__init__(program, described.workers, described.failures == "retry", at_once)
        self._inner = inner

    async def try_start(self) -> None:
        if type(self._inner).start is not Environment.start:
            await (await Worker.start(self._program)).close()

    @property
    def tools(self) -> Sequence[Tool]:
        return self._inner.tools

    def task(self, rng: Random) -> Task:
        number = rng.getrandbits(53)
        return Task(self._inner.task(Random(number)).messages, Drawn(number))

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return self._inner.demonstration(self._inner.task(Random(task.data.number)), rng, noise)


class VerifiersInWorkers(InWorkers):
    """A package for verifiers, which is drawn from and led where it is installed."""

    def __init__(self, described: stack.Environment) -> None:
        retries = described.failures == "retry"
        super().__init__(verifiers_program(described), described.workers, retries, described.at_once)

    def _outcome(self, outcome: Mapping[str, Any], policy: WholePolicy) -> Outcome:
        """Only what was judged is trained, and only where it is what was sampled."""
        for number, text in outcome["answers"]:
            if policy.said(number).text != text:
                raise EnvironmentFailed(
                    f"the environment judged {text[:60]!r} as answer {number + 1}, which is not what the "
                    "policy gave"
                )
        policy.keep({number for number, _ in outcome["answers"]})
        return self._weighed(outcome["scores"], outcome["metrics"])

    def _weighed(self, scores: Mapping[str, Sequence[float]], metrics: Mapping[str, float]) -> Outcome:
        """Each score has the package's own weight, where the stack gives it no other."""
        if strange := self.weights.keys() - scores.keys():
            raise EnvironmentFailed(f"it has no reward {', '.join(strange)}; it has {', '.join(scores)}")
        counted = {name for name, (_, weight) in scores.items() if weight or name in self.weights}
        rewards = {
            name: score if name in self.weights else score * weight
            for name, (score, weight) in scores.items()
            if name in counted
        }
        idle = {name: score for name, (score, _) in scores.items() if name not in counted}
        return Outcome(rewards=rewards or {"reward": 0.0}, metrics={**metrics, **idle})


def verifiers_program(described: stack.Environment) -> Program:
    """What a worker of a package runs."""
    settings = {key: getattr(described, key) for key in ("id", "version", "args", "agent")}
    adapter = Path(verifiers.__file__).with_name("adapter.py")
    return Program(described.name, adapter, settings, interpreter_of(described))


def interpreter_of(described: stack.Environment) -> str:
    """The Python of a package; the run's own where the stack names none."""
    return str(Path(described.python).expanduser()) if described.python else sys.executable


def in_workers(environment: Environment, described: stack.Environment) -> Environment:
    """``environment``, led in workers where it leads its rollouts itself."""
    if isinstance(environment, Verifiers):
        return VerifiersInWorkers(described)
    return OursInWorkers(environment, described) if isinstance(environment, AgentEnvironment) else environment
