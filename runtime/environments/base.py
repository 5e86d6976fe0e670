"""What an environment is: tasks, rollouts with rewards, and demonstrations. Text only, no tokens, no torch.

There are two kinds. A TurnEnvironment replies to answers and holds nothing between them: answer → ``reply`` →
answer → … until an outcome is done. An AgentEnvironment leads its rollout itself and may hold on to what it
needs meanwhile, a sandbox for example; it runs in a process of its own. A new environment is one file with a
subclass and one line in this package's registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates read it."""
_THOUGHTS, _THOUGHTS_END = "<think>", "</think>"
"""As reasoning models mark them."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of its arguments, an object."""

    def as_function(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model wrote; ``problem`` says why one could not be read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """What the model wrote in one turn, without the token that closes it."""

    text: str
    calls: tuple[Call, ...] = ()
    """Of tools, in order, where the environment has any."""
    closed: bool = True
    """Whether the model ended its turn; otherwise it was cut off."""
    thinking: bool = False
    """Whether the text begins within the model's thoughts, which the chat template has opened."""

    @property
    def said(self) -> str:
        """The text behind the thoughts that it begins with; empty where it ends within them."""
        _, ended, behind = self.text.rpartition(_THOUGHTS_END)
        if ended:
            return behind.lstrip()
        return "" if self.thinking or self.text.lstrip().startswith(_THOUGHTS) else self.text


@dataclass(frozen=True)
class Task:
    """One problem: the messages that the model reads first, and what the environment needs to judge by."""

    messages: tuple[Message, ...]
    data: Any


@dataclass(frozen=True)
class Outcome:
    """What an environment makes of the answers so far.

    ``rewards`` by name are those of the rollout if it ended here; what it is worth is their sum, each times
    its weight. ``messages`` are what the model reads next, where the rollout is not done. ``metrics`` are
    numbers to report; ``solved`` (0 or 1) is the exact match.
    """

    rewards: Mapping[str, float]
    done: bool = True
    messages: Sequence[Message] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One answer of a demonstration: whether it is learnt, and the environment's messages after it."""

    answer: str
    trained: bool = True
    messages: Sequence[Message] = ()


class NoRoom(Exception):
    """The model may not write another token: the sequence is as long as it may be."""


class Policy(Protocol):
    """The model, as one rollout of an AgentEnvironment sees it."""

    seconds: float | None
    """That the rollout may take as a whole, where it has a limit; one that takes longer is a failed one."""

    async def answer(self, *messages: Message) -> Answer:
        """Its answer to what was said so far and then ``messages``; the task's come before the first answer.

        Raises NoRoom where there is none left for an answer.
        """


class Environment(ABC):
    """A source of tasks. Instances hold no state between rollouts, so many of them run at once."""

    schema: ClassVar[dict[str, Any]]
    """JSON Schema of the stack's ``args``."""
    weights: Mapping[str, float] = {}
    """Of all rewards by name, where the stack says nothing else; 1 for those not named."""
    expected: Collection[str] = ()
    """Rewards that the stack weighs and that only the rollouts tell of: each must give them."""
    tools: Sequence[Tool] = ()
    """What the model may call; it is told of them before the task's first message."""

    @classmethod
    def made(cls, args: Mapping[str, Any]) -> Environment:
        """One with the ``args`` of a stack. Raises TypeError or ValueError with what is wrong with them."""
        return cls(**args)

    @classmethod
    def reward_names(cls, args: Mapping[str, Any]) -> Collection[str]:
        """What the rewards are called; empty where only the rollouts themselves tell."""
        return cls.weights

    async def start(self) -> None:
        """Try what rollouts need, before the first: of an AgentEnvironment in the process that leads them,
        of others in one like it before the run learns anything.

        An exception says why there can be none, and what to do.
        """
        return None

    @abstractmethod
    def task(self, rng: Random) -> Task:
        """Draw a task; the same state of ``rng`` gives the same task."""

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """Answers to learn from; each symbol is replaced by a random one with probability ``noise``.

        Raises NotImplementedError where the environment has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to learn from")


class TurnEnvironment(Environment):
    """One that replies to answers, and needs nothing but the answers for that."""

    @abstractmethod
    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        """Judge the last of ``answers``. An exception is a failed rollout, never a reward of zero."""


class AgentEnvironment(Environment):
    """One that leads its rollouts itself."""

    at_once: ClassVar[int | None] = None
    """Rollouts in one worker at a time, where the stack says nothing else and what they hold is large."""

    @abstractmethod
    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Let ``policy`` work on ``task`` to the end and judge that.

        An exception is a failed rollout, never a reward of zero. A cancelled rollout leaves nothing behind.
        """


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Message:
    """What a call gave."""
    return {"role": "tool", "content": text}
