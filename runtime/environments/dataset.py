"""Prompts of your own, and a reward that is a function of your own, a judge, or both."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from string import ascii_lowercase, digits
from typing import Any, ClassVar

from stackrl.runtime.data.files import DataError, Row
from stackrl.runtime.environments import questions
from stackrl.runtime.environments.base import Answer, Message, Outcome, Task, Turn, TurnEnvironment, user
from stackrl.runtime.environments.functions import functions
from stackrl.runtime.environments.judge import SCHEMA as JUDGE
from stackrl.runtime.environments.judge import Judge
from stackrl.runtime.environments.python import IMPORT_PATH

GROUP = "stackrl.rewards"
"""Of entry points."""
FUNCTION = {
    "type": "string",
    "pattern": IMPORT_PATH,
    "description": "A function `f(answer, row)` that gives a number: folder/file.py:f, package.module:f, or "
    f"the name of an entry point of the group `{GROUP}`.",
    "examples": ["rewards.py:right"],
}
Reward = Callable[[Task, Answer], Awaitable[float]]


class Dataset(TurnEnvironment):
    """A row is a task. The rollout is one answer, which every reward is asked about."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "dataset": questions.DATASET,
            **questions.PROPERTIES,
            "prompt": {
                "type": "string",
                "minLength": 1,
                "description": "Column with the prompt: a text, or a list of messages.",
            },
            "answer": {
                "type": "string",
                "minLength": 1,
                "description": "Column with the right answer, where there is one: what a judge compares "
                "with, and what demonstrations show.",
            },
            "system": {
                "type": "string",
                "minLength": 1,
                "description": "What the model is told before every prompt.",
            },
            "reward": {
                "anyOf": [
                    FUNCTION,
                    {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": {
                            "anyOf": [
                                FUNCTION,
                                {
                                    "type": "object",
                                    "properties": {"judge": JUDGE},
                                    "required": ["judge"],
                                    "additionalProperties": False,
                                },
                            ]
                        },
                    },
                ],
                "description": "What an answer is worth: one function, or several rewards by name, each a "
                "function or a judge. Their weights stand in the environment's `rewards`.",
            },
            "timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Seconds that a function may take; one that takes longer fails the rollout.",
            },
        },
        "required": ["dataset", "reward"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        dataset: str,
        reward: str | Mapping[str, Any],
        subset: str = "default",
        split: str = "train",
        limit: int | None = None,
        prompt: str = "prompt",
        answer: str = "answer",
        system: str = "",
        timeout: float = 10.0,
    ) -> None:
        self._prompt, self._answer = prompt, answer
        self._before: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        self._judges: list[Judge] = []
        self._rewards = {name: self._reward(name, what) for name, what in _by_name(reward).items()}
        paths = [what for what in _by_name(reward).values() if isinstance(what, str)]
        for path in paths:
            _check(path)
        self._functions = functions(paths, GROUP, timeout)
        self._rows = questions.rows_of(dataset, subset, split, limit)
        for row in self._rows:
            self._messages(row)

    @classmethod
    def reward_names(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(_by_name(args["reward"]))

    async def start(self) -> None:
        """Ask every judge whether it is there. Raises JudgeError."""
        for judge in self._judges:
            await judge.check()

    def task(self, rng: Random) -> Task:
        row = rng.choice(self._rows)
        return Task(self._messages(row), row.values)

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        """A function that raises, hangs or gives no number fails the rollout: it is no reward of zero.

        `solved` is told by the first reward alone: others may be of style, and never whole.
        """
        rewards = {name: await reward(task, answers[-1]) for name, reward in self._rewards.items()}
        return Outcome(rewards, metrics={"solved": float(next(iter(rewards.values())) >= 1)})

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        if task.data.get(self._answer) is None:
            raise NotImplementedError(
                f"rows without {self._answer!r} show no right answer to learn from; name the column that has "
                "it as `answer`, or leave the supervised stage out"
            )
        text = str(task.data[self._answer])
        return [Turn("".join(_another(letter, rng) if rng.random() < noise else letter for letter in text))]

    def _messages(self, row: Row) -> tuple[Message, ...]:
        """Raises DataError where the row has no prompt."""
        prompt = row.values.get(self._prompt)
        if isinstance(prompt, str):
            return (*self._before, user(prompt))
        if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
            return (*self._before, *prompt)
        what = "has no" if prompt is None else "has neither a text nor a list of messages as"
        raise DataError(
            f"{row.place}: the row {what} {self._prompt!r}; its columns are "
            f"{', '.join(sorted(row.values))}: name the right one as `prompt`"
        )

    def _reward(self, name: str, what: str | Mapping[str, Any]) -> Reward:
        if not isinstance(what, str):
            judge = Judge(**what["judge"])
            self._judges.append(judge)

            async def judged(task: Task, answer: Answer) -> float:
                asked = "\n".join(str(message["content"] or "") for message in task.messages)
                reference = task.data.get(self._answer)
                return await judge.score(asked, answer.said, "" if reference is None else str(reference))

            return judged

        async def computed(task: Task, answer: Answer) -> float:
            label = f"reward {name!r} ({what})"
            return await self._functions.call(what, answer.text, task.data, name=label)

        return computed


def _by_name(reward: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A single function's reward is called like the function."""
    return {reward.rpartition(":")[2]: reward} if isinstance(reward, str) else reward


def _check(path: str) -> None:
    """Raises ValueError where ``path`` names nothing that can be called as a reward."""
    from stackrl.runtime.own_code import load

    function = load(path, GROUP)
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise ValueError(
            f"{path}: cannot be called as f(answer, row): {error}; `answer` is the model's text, `row` the "
            "row of the data set with all its columns"
        ) from None
    except ValueError:
        pass  # built-in functions do not tell what they take


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value


def _another(letter: str, rng: Random) -> str:
    """A letter of the same kind; what is neither letter nor digit stays."""
    if letter in digits:
        return rng.choice(digits)
    return rng.choice(ascii_lowercase) if letter.isalpha() else letter
