"""What an environment is: tasks, replies with rewards, and demonstrations. Text only, no tokens, no torch.

A rollout goes ``task`` → answer of the model → ``reply`` → answer → … until an outcome is done. A new
environment is one file with a subclass and one line in this package's registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

Message = dict[str, str]
"""``{"role": ..., "content": ...}``, as chat templates read it."""


@dataclass(frozen=True)
class Task:
    """One problem: the messages that the model reads first, and what the environment needs to judge by."""

    messages: tuple[Message, ...]
    data: Any


@dataclass(frozen=True)
class Outcome:
    """What an environment makes of the answers so far.

    ``reward`` is that of the rollout if it ended here. ``message`` is what the model reads next, where the
    rollout is not done. ``metrics`` are numbers to report; ``solved`` (0 or 1) is the exact match.
    """

    reward: float
    done: bool = True
    message: Message | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One answer of a demonstration: whether it is learnt, and the environment's message after it."""

    answer: str
    trained: bool = True
    message: Message | None = None


class Environment(ABC):
    """A source of tasks. Instances hold no state between rollouts, so many of them run at once."""

    schema: ClassVar[dict[str, Any]]
    """JSON Schema of the stack's ``args``."""

    @abstractmethod
    def task(self, rng: Random) -> Task:
        """Draw a task; the same state of ``rng`` gives the same task."""

    @abstractmethod
    async def reply(self, task: Task, answers: Sequence[str]) -> Outcome:
        """Judge the last of ``answers``. An exception is a failed rollout, never a reward of zero."""

    @abstractmethod
    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """Answers to learn from; each symbol is replaced by a random one with probability ``noise``."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
