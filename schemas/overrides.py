"""`--set key.path=value`: change a value of the stack from the command line."""

from __future__ import annotations

from typing import Any

from stackrl.schemas.problems import STACK, Path, Place, Problem
from stackrl.schemas.source import Source, not_json, parse_value
from stackrl.schemas.words import show


def apply(source: Source, overrides: list[str]) -> list[Problem]:
    """Change ``source`` by overrides like ``stages.short.steps=5``. Returns what is wrong with them.

    The value is typed as in a file. A list is entered by position or by the `name` of an entry; a mapping
    that is not there yet is made. From then on errors about these values name the option.
    """
    return [problem for text in overrides if (problem := _apply(source, text)) is not None]


def _apply(source: Source, text: str) -> Problem | None:
    place = Place(f"--set {text.partition('=')[0]}")
    keys, equals, value_text = text.partition("=")
    steps = keys.strip().split(".")
    if not (equals and all(steps)):
        return Problem(
            (), "is not KEY=VALUE", "for example --set algorithm.group_size=4", place=Place(f"--set {text}")
        )
    try:
        value = parse_value(value_text)
    except ValueError as error:
        return Problem((), f"the value is not YAML: {error}", "put it in quotes", place=place)
    try:
        data, path = _changed(source.data, [*STACK, *steps], value, ())
    except LookupError as error:
        return Problem((), str(error.args[0]), "`stackrl show` prints the stack as it is", place=place)
    for problem in not_json(value, path):
        return Problem(problem.path, problem.what, problem.mend, place=place)
    source.data = data
    source.keys[path] = place
    for known in [known for known in source.values if known[: len(path)] == path]:
        del source.values[known]
    for length in range(1, len(path) + 1):  # mappings on the way that are not in the file come with it
        source.values.setdefault(path[:length], place)
    return None


def _changed(data: Any, steps: list[str], value: Any, above: Path) -> tuple[Any, Path]:
    """``data`` with ``value`` at ``steps``, which itself stays (anchors share parts), and the full path."""
    if not steps:
        return value, above
    step, rest = steps[0], steps[1:]
    if isinstance(data, list):
        index = _position(data, step)
        inner, path = _changed(data[index], rest, value, (*above, index))
        return [*data[:index], inner, *data[index + 1 :]], path
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise LookupError(f"{above[-1]} is {show(data)} and has no key {step}")
    inner, path = _changed(data.get(step), rest, value, (*above, step))
    return {**data, step: inner}, path


def _position(entries: list, step: str) -> int:
    """The entry of a list that ``step`` means: its position from 0, or its name."""
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    if step in names:
        return names.index(step)
    if step.isdecimal() and int(step) < len(entries):
        return int(step)
    known = ", ".join(str(name) for name in names if name) or "none has a name"
    raise LookupError(f"the list has no entry {step}: it has {len(entries)} ({known})")
