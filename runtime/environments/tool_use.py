"""Answer with the help of tools: a calculator, and a search over documents that the question is about.

The model calls a tool, reads what it gave, calls another one, and answers in a turn without a call. A call
that cannot be read or done is told so and costs a turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.answers import digits_alike, last_number, with_other_digits
from stackrl.runtime.environments.arithmetic import LARGEST, drawn
from stackrl.runtime.environments.base import (
    Answer,
    Call,
    Message,
    Outcome,
    Task,
    Tool,
    Turn,
    TurnEnvironment,
    tool,
    user,
)
from stackrl.runtime.environments.calculator import CalculatorError, calculate

CALCULATOR = Tool(
    "calculator",
    "Compute an expression of numbers and + - * / ( ).",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
SEARCH = Tool(
    "search",
    "Find the document that fits some words best.",
    {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
)
TOOLS = {tool.name: tool for tool in (CALCULATOR, SEARCH)}
GOODS = (
    *("bell", "boat", "book", "bowl", "cake", "chair", "clock", "coat", "drum", "flute", "glass", "hat"),
    *("kite", "knife", "lamp", "map", "mirror", "pen", "ring", "rope", "shoe", "spoon", "table", "tent"),
)
DOCUMENTS = 8
"""Of each question, most of them about something else."""


class ToolUse(TurnEnvironment):
    """Expressions where the calculator is the only tool, else what goods cost that documents tell of."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "tools": {
                "type": "array",
                "items": {"enum": sorted(TOOLS)},
                "minItems": 1,
                "uniqueItems": True,
                "description": "What the model may call.",
            },
            "goods": {
                "type": "integer",
                "minimum": 1,
                "maximum": DOCUMENTS,
                "description": "Kinds of goods, or numbers of an expression beside the first, in a question.",
            },
            "largest": LARGEST,
            "turns": {"type": "integer", "minimum": 1, "description": "Answers that the model may give."},
        },
        "additionalProperties": False,
    }
    weights = {"right": 0.6, "digits": 0.2, "calls": 0.2}

    def __init__(
        self,
        tools: Sequence[str] = ("calculator", "search"),
        goods: int = 2,
        largest: int = 20,
        turns: int = 6,
    ) -> None:
        self.tools = tuple(TOOLS[name] for name in tools)
        self.goods, self.largest, self.turns = goods, largest, turns
        self.searches = SEARCH in self.tools
        if turns <= self._calls_needed:
            raise ValueError(
                f"turns: {turns} are too few for {self._calls_needed} calls and an answer; make it "
                f"{self._calls_needed + 1}"
            )

    @property
    def _calls_needed(self) -> int:
        return self.goods * self.searches + (CALCULATOR in self.tools)

    def task(self, rng: Random) -> Task:
        if not self.searches:
            expression, value = drawn(rng, self.largest, self.goods + 1, "+-*")
            return Task((user(f"{expression}=?"),), {"answer": value, "expression": expression})
        prices = {name: rng.randint(1, self.largest) for name in rng.sample(GOODS, DOCUMENTS)}
        bought = {name: rng.randint(2, 9) for name in rng.sample(sorted(prices), self.goods)}
        listed = " and ".join(f"{count} x {name}" for name, count in bought.items())
        return Task(
            (user(f"What do {listed} cost?"),),
            {
                "answer": sum(count * prices[name] for name, count in bought.items()),
                "expression": "+".join(f"{count}*{prices[name]}" for name, count in bought.items()),
                "documents": [f"The {name} costs {price} coins." for name, price in prices.items()],
                "needed": list(bought),
            },
        )

    async def reply(self, task: Task, answers: Sequence[Answer]) -> Outcome:
        """``calls``: which share of the calls that the question takes were done."""
        last = answers[-1]
        done = not last.calls or len(answers) == self.turns
        written = None if last.calls else last_number(last.said)
        right = float(written is not None and abs(written - task.data["answer"]) < 1e-6)
        calls = [call for answer in answers for call in answer.calls]
        bad = sum(_failed(self._called(call, task)) for call in calls)
        return Outcome(
            {
                "right": right,
                "digits": digits_alike(written, task.data["answer"]),
                "calls": self._done(calls, task),
            },
            done=done,
            messages=() if done else tuple(self._called(call, task) for call in last.calls),
            metrics={"solved": right, "calls": float(len(calls)), "bad_calls": float(bad)},
        )

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        """The calls as ChatML models write them; noise replaces digits of what is computed and answered."""
        calls = [Call("search", {"words": name}) for name in task.data.get("needed", ())]
        if CALCULATOR in self.tools:
            expression = with_other_digits(task.data["expression"], rng, noise)
            calls.append(Call("calculator", {"expression": expression}))
        turns = [Turn(_written(call), messages=(self._called(call, task),)) for call in calls]
        return [*turns, Turn(with_other_digits(str(task.data["answer"]), rng, noise))]

    def _called(self, call: Call, task: Task) -> Message:
        """What the call gave, or why it gave nothing."""
        offered = {tool.name: tool for tool in self.tools}
        if call.problem:
            return tool(f"error: {call.problem}")
        if call.name not in offered:
            return tool(f"error: there is no tool {call.name!r}; there is {' and '.join(offered)}")
        [argument] = offered[call.name].parameters["required"]
        value = call.arguments.get(argument)
        if not isinstance(value, str):
            return tool(f"error: {call.name} needs {argument}, a text")
        if call.name == SEARCH.name:
            return tool(found(value, task.data["documents"]) or "error: no document has these words")
        try:
            return tool(calculate(value))
        except CalculatorError as error:
            return tool(f"error: {error}")

    def _done(self, calls: Sequence[Call], task: Task) -> float:
        if not self._calls_needed:
            return 1.0
        gave = {self._called(call, task)["content"] for call in calls}
        wanted = {found(name, task.data["documents"]) for name in task.data.get("needed", ())}
        if CALCULATOR in self.tools:
            wanted.add(str(task.data["answer"]))
        return len(gave & wanted) / len(wanted)


def found(words: str, documents: Sequence[str]) -> str:
    """The document with most of ``words``, the first of several; empty where none has any."""
    asked = _words(words)
    best = max(documents, key=lambda document: len(asked & _words(document)))
    return best if asked & _words(best) else ""


def _words(text: str) -> set[str]:
    return {word.strip(".,?").lower() for word in text.split()} - {"the", "a", "x"}


def _written(call: Call) -> str:
    content = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    return f"<tool_call>\n{content}\n</tool_call>"


def _failed(message: Message) -> bool:
    return message["content"].startswith("error: ")
