"""pydantic's errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from stackrl.schemas.problems import Path, Problem
from stackrl.schemas.words import (
    KINDS,
    JsonSchema,
    choice,
    form_of,
    missing_key,
    near,
    pattern_mend,
    schema_at,
    show,
    type_mend,
    unknown_key,
)

_PYDANTIC_KINDS = {
    "string_type": "string",
    "int_type": "integer",
    "int_from_float": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "list_type": "array",
    "tuple_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}


_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def from_pydantic(
    errors: Iterable[Mapping[str, Any]], data: Any, schema: JsonSchema, root: Path
) -> list[Problem]:
    """Problems of ``data``, which ``schema`` describes and which stands at ``root`` in the file."""
    found: dict[Path, list[Mapping[str, Any]]] = {}
    for error in errors:
        found.setdefault(_written(error["loc"], data, error["type"]), []).append(error)
    return [_pydantic_problem(path, group, data, schema, root) for path, group in found.items()]


def _written(location: Path, data: Any, kind: str) -> Path:
    """pydantic's location without the names of union members, which the file does not hold."""
    path: Path = ()
    for position, step in enumerate(location):
        last = position == len(location) - 1
        if isinstance(data, dict) and (step in data or (last and kind == "missing")):
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            data = data[step]
        else:
            continue
        path = (*path, step)
    return path


def _pydantic_problem(path: Path, group: list, data: Any, schema: JsonSchema, root: Path) -> Problem:
    error, full = group[0], (*root, *path)
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "extra_forbidden":
        return unknown_key(full, schema_at(schema, data, path[:-1]).get("properties", {}))
    if kind == "missing":
        return missing_key(full, schema_at(schema, data, path), schema)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = context["discriminator"].strip("'()")
        if kind == "union_tag_not_found":
            if not isinstance(value, dict):
                return Problem(full, f"must be a mapping of keys, is {show(value)}")
            kinds = [
                form["properties"][key]["const"]
                for form in _forms(schema, data, path)
                if key in form["properties"]
            ]
            return Problem(
                (*full, key), f"the key {key} is missing", f"say {key}: {' or '.join(kinds)}", at_key=True
            )
        tags = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        given = value.get(key, context["tag"]) if isinstance(value, dict) else context["tag"]
        return Problem((*full, key), f"{show(given)} is not one of {', '.join(tags)}", near(given, tags))
    if len(group) > 1 or kind == "literal_error":
        return _not_one_of(full, group, value)
    return Problem(full, *_pydantic_words(kind, context, value, schema_at(schema, data, path)))


def _forms(schema: JsonSchema, data: Any, path: Path) -> list[JsonSchema]:
    """The members of the union at ``path``."""
    holder = schema_at(schema, data, path[:-1])
    step = path[-1]
    part = holder.get("items", {}) if isinstance(step, int) else holder.get("properties", {}).get(step, {})
    while "$ref" in part:
        part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]]
    options = part.get("oneOf") or part.get("anyOf") or []
    return [form for form in (form_of(option, None, schema) for option in options) if "properties" in form]


def _not_one_of(path: Path, group: list, value: Any) -> Problem:
    """A value that fits none of several kinds: `rest` or a whole number."""
    words, literals = [], []
    for error in group:
        if error["type"] == "literal_error":
            literals += [literal.strip(" '") for literal in re.split(r",| or ", error["ctx"]["expected"])]
        elif error["type"] in _PYDANTIC_KINDS:
            words.append(KINDS[_PYDANTIC_KINDS[error["type"]]])
        else:
            words.append(
                _pydantic_words(error["type"], error.get("ctx", {}), value, {})[0].split(", is ")[0][8:]
            )
    options = choice([*dict.fromkeys(words), *literals])
    return Problem(path, f"must be {options}, is {show(value)}", near(value, literals) if not words else "")


def _pydantic_words(kind: str, context: Mapping, value: Any, schema: JsonSchema) -> tuple[str, str]:
    if kind in _PYDANTIC_KINDS:
        return f"must be {KINDS[_PYDANTIC_KINDS[kind]]}, is {show(value)}", type_mend(
            _PYDANTIC_KINDS[kind], value
        )
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"must be {words} {context[key]:.15g}, is {show(value)}", ""
    if kind == "int_parsing_size":
        return f"is too large a number: {show(value)}", "write a smaller one"
    if kind in ("too_short", "string_too_short"):
        count = context["min_length"]
        return (f"must not be empty, is {show(value)}" if count == 1 else f"must hold at least {count}"), ""
    if kind in ("too_long", "string_too_long"):
        return (
            f"must hold at most {context['max_length']}, holds {context.get('actual_length', len(value))}",
            "",
        )
    if kind == "string_pattern_mismatch":
        return f"{value!r} is not written as it must be", pattern_mend(value, schema, context["pattern"])
    return f"does not fit: {kind.replace('_', ' ')}", ""
