"""Whether a value plainly fits a JSON Schema: most do, and jsonschema takes longer to import than all else.

What is said here is only ever yes; whoever hears no asks jsonschema what is wrong, if anything is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

JsonSchema = Mapping[str, Any]

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_SILENT = {"$schema", "title", "description", "default", "examples", "case_insensitive_enum", "then", "else"}
"""Keywords that jsonschema does not look at by themselves."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def surely_fits(value: Any, schema: JsonSchema | bool) -> bool:
    """False where ``value`` does not fit ``schema``, and where that takes more than a glance to see."""
    if isinstance(schema, bool):
        return schema
    return all(
        word in _SILENT or (word in _WORDS and _WORDS[word](value, wanted, schema))
        for word, wanted in schema.items()
    )


def _is_of_type(value: Any, wanted: str | list[str], schema: JsonSchema) -> bool:
    return any(_TYPES[kind](value) for kind in ([wanted] if isinstance(wanted, str) else wanted))


def _is_one_of(value: Any, wanted: list[Any], schema: JsonSchema) -> bool:
    return isinstance(value, str) and value in wanted


def _is(value: Any, wanted: Any, schema: JsonSchema) -> bool:
    return isinstance(value, str) and value == wanted


def _fits_some(value: Any, wanted: list[JsonSchema], schema: JsonSchema) -> bool:
    return any(surely_fits(value, form) for form in wanted)


def _fits_one(value: Any, wanted: list[JsonSchema], schema: JsonSchema) -> bool:
    """Where the type alone tells which form is meant."""
    meant = [form for form in wanted if "type" not in form or _is_of_type(value, form["type"], form)]
    return len(meant) == 1 and surely_fits(value, meant[0])


def _fits_all(value: Any, wanted: list[JsonSchema], schema: JsonSchema) -> bool:
    return all(surely_fits(value, form) for form in wanted)


def _fits_branch(value: Any, wanted: JsonSchema, schema: JsonSchema) -> bool:
    """``if``: `then` where it holds, `else` where a text tells that it does not, else both."""
    then, otherwise = (surely_fits(value, schema.get(word, True)) for word in ("then", "else"))
    if surely_fits(value, wanted):
        return then
    return otherwise and (then or _says_otherwise(value, wanted))


def _says_otherwise(value: Any, form: JsonSchema) -> bool:
    """Whether a key has another text than the one that ``form`` wants."""
    wanted = {key: inner["const"] for key, inner in form.get("properties", {}).items() if "const" in inner}
    return isinstance(value, dict) and any(
        isinstance(value.get(key), str) and value[key] != text for key, text in wanted.items()
    )


def _has_all(value: Any, wanted: list[str], schema: JsonSchema) -> bool:
    return not isinstance(value, dict) or all(key in value for key in wanted)


def _values_fit(value: Any, wanted: Mapping[str, JsonSchema], schema: JsonSchema) -> bool:
    return not isinstance(value, dict) or all(
        surely_fits(value[key], form) for key, form in wanted.items() if key in value
    )


def _matching_fit(value: Any, wanted: Mapping[str, JsonSchema], schema: JsonSchema) -> bool:
    """``patternProperties``."""
    if not isinstance(value, dict):
        return True
    return all(isinstance(key, str) for key in value) and all(
        surely_fits(inner, form)
        for pattern, form in wanted.items()
        for key, inner in value.items()
        if re.search(pattern, key)
    )


def _others_fit(value: Any, wanted: bool | JsonSchema, schema: JsonSchema) -> bool:
    """``additionalProperties``: of the keys that no other word speaks of."""
    if not isinstance(value, dict):
        return True
    patterns = "|".join(f"(?:{pattern})" for pattern in schema.get("patternProperties", {}))
    others = [
        inner
        for key, inner in value.items()
        if key not in schema.get("properties", {})
        and not (patterns and isinstance(key, str) and re.search(patterns, key))
    ]
    return all(surely_fits(inner, wanted) for inner in others)


def _items_fit(value: Any, wanted: JsonSchema, schema: JsonSchema) -> bool:
    return not isinstance(value, list) or all(surely_fits(item, wanted) for item in value)


def _are_unique(value: Any, wanted: bool, schema: JsonSchema) -> bool:
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return not isinstance(value, list) or (texts and len(set(value)) == len(value))


def _matches(value: Any, wanted: str, schema: JsonSchema) -> bool:
    return not isinstance(value, str) or re.search(wanted, value) is not None


def _number(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any, JsonSchema], bool]:
    """A limit of numbers, which says nothing about other values."""
    return lambda value, wanted, schema: not isinstance(value, int | float) or holds(value, wanted)


def _length(kind: type, holds: Callable[[int, int], bool]) -> Callable[[Any, Any, JsonSchema], bool]:
    return lambda value, wanted, schema: not isinstance(value, kind) or holds(len(value), wanted)


def _at_least(value: Any, wanted: Any) -> bool:
    return value >= wanted


def _at_most(value: Any, wanted: Any) -> bool:
    return value <= wanted


_WORDS: dict[str, Callable[[Any, Any, JsonSchema], bool]] = {
    "type": _is_of_type,
    "enum": _is_one_of,
    "const": _is,
    "anyOf": _fits_some,
    "oneOf": _fits_one,
    "allOf": _fits_all,
    "if": _fits_branch,
    "required": _has_all,
    "properties": _values_fit,
    "patternProperties": _matching_fit,
    "additionalProperties": _others_fit,
    "items": _items_fit,
    "uniqueItems": _are_unique,
    "pattern": _matches,
    "minimum": _number(_at_least),
    "maximum": _number(_at_most),
    "exclusiveMinimum": _number(lambda value, wanted: value > wanted),
    "exclusiveMaximum": _number(lambda value, wanted: value < wanted),
    "minLength": _length(str, _at_least),
    "maxLength": _length(str, _at_most),
    "minItems": _length(list, _at_least),
    "maxItems": _length(list, _at_most),
    "minProperties": _length(dict, _at_least),
    "maxProperties": _length(dict, _at_most),
}
