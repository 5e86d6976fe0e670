"""Whom a worker has to do with: what it runs, the model it asks, and how it fails."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stackrl.runtime.environments.base import Answer, Message


class EnvironmentFailed(Exception):
    """The environment could not take a rollout to its end: no reward, and no reward of zero."""


class WorkerLost(Exception):
    """A worker died, hung or blocked. Its rollouts may be innocent: they can begin anew."""


class WorkerRefused(EnvironmentFailed):
    """A worker cannot run its environment: ``what`` is wrong, how to ``mend`` it, and the ``key`` of the
    stack that it is about."""

    def __init__(self, what: str, mend: str = "", key: str = "") -> None:
        super().__init__(f"{what}; {mend}" if mend else what)
        self.what, self.mend, self.key = what, mend, key


class WholePolicy(Protocol):
    """The model, for a worker's rollout."""

    async def answer(self, *messages: Message) -> Answer:
        """As base.Policy.answer."""

    async def complete(self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """Answer to a whole ``history``, in which ``{"answer": n}`` stands for the n-th answer of this
        rollout, and tell which answer that is. Raises NoRoom."""

    def said(self, number: int) -> Answer:
        """The answer of that number. Raises KeyError where there is none."""

    def keep(self, numbers: Collection[int]) -> None:
        """Train these answers alone; the others were given up by the environment."""


@dataclass(frozen=True)
class Program:
    """What a worker runs."""

    name: str
    """The environment's, for people."""
    adapter: Path
    """See program.py."""
    settings: Mapping[str, Any]
    interpreter: str
