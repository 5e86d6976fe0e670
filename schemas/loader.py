"""A stack file → a checked stack, or everything that is wrong with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from stackrl.schemas import overrides as override
from stackrl.schemas import rules, skypilot, source
from stackrl.schemas.jsonschema_words import problems_by
from stackrl.schemas.problems import STACK, Problem, StackError
from stackrl.schemas.pydantic_words import from_pydantic
from stackrl.schemas.source import Source
from stackrl.schemas.stack import Stack


@dataclass(frozen=True)
class LoadedStack:
    """A stack that passed every check."""

    path: File
    task: dict[str, Any]
    """SkyPilot's task: the whole file as plain values, overrides applied."""
    stack: Stack
    """The resolved stack: overrides applied, defaults filled in."""
    overrides: tuple[str, ...]
    hash: str
    """SHA-256 of the file's text."""
    source: Source
    """Where each value is written, for problems that are found later."""

    @property
    def name(self) -> str:
        return self.task.get("name") or self.path.stem

    def locate(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems found after loading, with their places."""
        return [self.source.locate(problem) for problem in problems]


def load(path: File | str, overrides: Sequence[str] = ()) -> LoadedStack:
    """Read and check a stack file. Raises StackError with all problems at once."""
    file = File(path)
    name, text = source.read_file(file)
    return load_text(text, file, name, overrides)


def load_text(text: str, path: File, name: str, overrides: Sequence[str] = ()) -> LoadedStack:
    """As load, for text that is, or will be, at ``path``."""
    read = source.parse(name, text)
    problems = override.apply(read, list(overrides))
    problems += [read.locate(problem) for problem in _check_task(read.data)]
    stack, found = _check_stack(read.data)
    problems += map(read.locate, found)
    if stack is not None:
        # rules may lean on a task of the right types, so they run only when the task is whole
        wrong_task = any(problem.path[:1] != STACK[:1] for problem in problems)
        problems += map(read.locate, rules.check(stack, None if wrong_task else read.data, path))
    if problems:
        raise StackError(sorted(set(problems), key=_reading_order))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedStack(path, read.data, stack, tuple(overrides), digest, read)


def _check_task(task: dict[str, Any]) -> list[Problem]:
    """SkyPilot's keys."""
    checked = skypilot.as_checked({key: value for key, value in task.items() if key != STACK[0]})
    problems = problems_by(skypilot.task_schema(), checked, ())
    own = Stack.model_fields
    return [
        Problem(
            problem.path,
            "a key of the stack, not of SkyPilot",
            f"put it under {'.'.join(STACK)}",
            at_key=True,
        )
        if len(problem.path) == 1 and problem.at_key and problem.path[0] in own
        else problem
        for problem in problems
    ]


def _check_stack(task: dict[str, Any]) -> tuple[Stack | None, list[Problem]]:
    """Our keys."""
    metadata = task.get(STACK[0])
    if not isinstance(metadata, dict) or STACK[1] not in metadata:
        return None, [_no_stack(metadata)]
    data = metadata[STACK[1]]
    try:
        return Stack.model_validate(data), []
    except ValidationError as error:
        schema = Stack.model_json_schema()
        return None, from_pydantic(error.errors(include_url=False), data, schema, STACK)


def _no_stack(metadata: Any) -> Problem:
    typed = get_close_matches(STACK[1], metadata, 1) if isinstance(metadata, dict) else []
    if typed:
        return Problem((STACK[0], typed[0]), "there is no such key", f"did you mean {STACK[1]}?", at_key=True)
    what = f"there is no {'.'.join(STACK)}: this is a SkyPilot task without a stack"
    return Problem((), what, "`stackrl init` writes a stack to start from")


def _reading_order(problem: Problem) -> tuple:
    place = problem.place
    return (place.line == 0, place.source if place.line == 0 else "", place.line, place.column, str(problem))
