"""Reading the values of calls that a model wrote, and checking them against the tools that there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry

from stackrl.runtime.environments.base import Call, Tool

_WORDS = {"True": True, "False": False, "None": None}
"""As Python writes what JSON writes in small letters; templates that print values do so."""
_NOTHING_ELSE = Registry()
"""Schemas that those of tools may refer to: none, and nothing is fetched."""
_LONGEST = 200
"""Letters of a problem that a model is told."""


class Unreadable(ValueError):
    """Text that is no call. The message tells the model what is wrong with it."""


def read_json(text: str) -> Any:
    """The value of ``text``. Raises Unreadable."""
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError as error:
        raise Unreadable("its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is no JSON: {error.msg} at character {error.pos + 1}") from error
    except ValueError as error:
        raise Unreadable(f"it is no JSON: {error}") from error


def read_object(text: str, arguments: str) -> Call:
    """The call in ``text``: a JSON object of a name and, under the key ``arguments``, an object of arguments.

    Raises Unreadable.
    """
    value = read_json(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable(f'a call is a JSON object with "name" and "{arguments}"')
    given = value.get(arguments, {})
    if not isinstance(given, dict):
        return Call(value["name"], problem=f'"{arguments}" is no JSON object')
    return Call(value["name"], given)


def read_arguments(name: str, written: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> dict[str, Any]:
    """Arguments that were written as bare text: strings as they stand, other types as JSON.

    What is no JSON of its type stays text; the tool's schema then refuses it.
    """
    properties = next((tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {})
    types = {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {key: _value(text, types.get(key)) for key, text in written}


def checked(call: Call, tools: Sequence[Tool]) -> Call:
    """``call``, with its problem where there is no such tool or the arguments are not as it wants them."""
    if call.problem:
        return call
    parameters = next((tool.parameters for tool in tools if tool.name == call.name), None)
    if parameters is None:
        names = ", ".join(tool.name for tool in tools)
        return Call(call.name, call.arguments, f"there is no function {call.name!r}; there is {names}")
    return Call(call.name, call.arguments, _problem(call.arguments, parameters))


def _problem(arguments: Mapping[str, Any], parameters: dict[str, Any]) -> str:
    error = next(Draft202012Validator(parameters, registry=_NOTHING_ELSE).iter_errors(dict(arguments)), None)
    if error is None:
        return ""
    where = f"argument {error.path[0]!r}: " if error.path else ""
    return f"{where}{error.message}"[:_LONGEST]


def _value(text: str, type: Any) -> Any:
    if type == "string":
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return read_json(text)
    except Unreadable:
        return text


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
