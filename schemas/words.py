"""How errors about a value are said: kinds in plain words, the key that was probably meant, a mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from stackrl.schemas.problems import Path, Problem

JsonSchema = Mapping[str, Any]

KINDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping of keys",
    "null": "empty",
}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``did you mean X?``, or the words there are."""
    words = list(known)
    near = difflib.get_close_matches(str(word).lower(), words, 1, 0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is {', '.join(words)}" if words else ""


def near(word: object, known: list[str]) -> str:
    if not isinstance(word, str):
        return ""
    found = difflib.get_close_matches(word.lower(), known, 1, 0.5)
    return f"did you mean {found[0]}?" if found else ""


def choice(options: list[str]) -> str:
    return " or ".join(options) if len(options) < 3 else f"one of {', '.join(options)}"


def show(value: Any) -> str:
    """A value as an error names it: its kind and, where it is short, the value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value[:40]!r}" + ("…" if len(value) > 40 else "")
    if isinstance(value, int | float):
        return str(value)[:40]
    return "a list" if isinstance(value, list) else "a mapping of keys"


def type_mend(kind: str, value: Any) -> str:
    if (
        kind in ("integer", "number")
        and isinstance(value, str)
        and re.fullmatch(r"\s*[-+]?[\d._eE+-]+\s*", value)
    ):
        return f"write it without quotes: {value.strip()}"
    if kind == "string" and isinstance(value, bool | int | float):
        shown = str(value).lower() if isinstance(value, bool) else value
        return f'put it in quotes: "{shown}"'
    if value is None:
        return "leave the key out to take the default"
    if kind == "array" and not isinstance(value, dict):
        return f"write a list: [{value}]"
    return ""


def pattern_mend(value: str, schema: JsonSchema, pattern: str) -> str:
    """How a value that does not match is written: by example, in the schema's words, or by the pattern."""
    if examples := schema.get("examples"):
        return f"for example {examples[0]}"
    meant = near(value.partition("/")[0], re.findall(r"\w{2,}", pattern))
    return meant or schema.get("description") or f"it must match {pattern}"


def unknown_key(path: Path, allowed: Iterable[str], patterns: Iterable[re.Pattern] = ()) -> Problem:
    known = list(allowed)
    mend = did_you_mean(path[-1], known)
    if not known:
        mend = (
            f"keys here match {' or '.join(p.pattern for p in patterns)}"
            if patterns
            else "nothing may stand here"
        )
    return Problem(path, "there is no such key", mend, at_key=True)


def missing_key(path: Path, part: JsonSchema, root: JsonSchema) -> Problem:
    part = form_of(part, None, root)
    kind = KINDS.get(part.get("type", ""), "")
    options = [part["const"]] if "const" in part else part.get("enum", [])
    words = " or ".join(map(str, options)) or kind
    return Problem(
        path, f"the key {path[-1]} is missing", f"say {path[-1]}: {words}" if words else "add it", at_key=True
    )


def schema_at(schema: JsonSchema, data: Any, path: Path) -> JsonSchema:
    """The part of ``schema`` that describes ``path`` in ``data``; {} where it says nothing."""
    part = form_of(schema, data, schema)
    for step in path:
        if isinstance(step, int):
            inner = part.get("items", {})
            data = data[step] if isinstance(data, list) and step < len(data) else None
        else:
            inner = part.get("properties", {}).get(step, {})
            data = data.get(step) if isinstance(data, dict) else None
        part = form_of(inner, data, schema)
    return part


def form_of(part: JsonSchema, value: Any, root: JsonSchema) -> JsonSchema:
    """Follow $ref, and among alternatives take the one that ``value`` says it is."""
    while "$ref" in part:
        part = root["$defs"][part["$ref"].rsplit("/", 1)[1]]
    options = part.get("oneOf") or part.get("anyOf")
    if not options:
        return part
    forms = [form_of(option, value, root) for option in options]
    for form in forms:
        properties = form.get("properties", {})
        marks = {key: item for key, item in properties.items() if "const" in item}
        if properties and isinstance(value, dict):
            if all(value.get(key, item.get("default")) == item["const"] for key, item in marks.items()):
                return form
        elif _fits_kind(value, form.get("type")):
            return form
    return next((form for form in forms if form.get("type") != "null"), forms[0])


def _fits_kind(value: Any, kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    types = {
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "array": list,
        "object": dict,
        "null": type(None),
    }
    return any(name in types and isinstance(value, types[name]) for name in kinds)
