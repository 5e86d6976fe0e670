"""jsonschema's errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from stackrl.schemas.problems import Path, Problem
from stackrl.schemas.quick_check import surely_fits
from stackrl.schemas.words import (
    KINDS,
    JsonSchema,
    choice,
    missing_key,
    near,
    pattern_mend,
    show,
    type_mend,
    unknown_key,
)

_JSON_LIMITS = {
    "exclusiveMinimum": "more than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def problems_by(schema: JsonSchema, data: Any, root: Path) -> list[Problem]:
    """What is wrong with ``data`` by ``schema``; jsonschema is loaded where there may be something."""
    if surely_fits(data, schema):
        return []
    from jsonschema import Draft202012Validator

    return from_jsonschema(Draft202012Validator(schema).iter_errors(data), data, schema, root)


def from_jsonschema(errors: Iterable[Any], data: Any, schema: JsonSchema, root: Path) -> list[Problem]:
    """As from_pydantic, for the errors of a jsonschema validator."""
    problems = []
    for error in errors:
        path = tuple(error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            allowed = error.schema.get("properties", {})
            patterns = [re.compile(pattern) for pattern in error.schema.get("patternProperties", {})]
            for key in error.instance:
                if key not in allowed and not any(pattern.search(key) for pattern in patterns):
                    problems.append(unknown_key((*root, *path, key), allowed, patterns))
        elif error.validator == "required":
            problems += [
                missing_key((*root, *path, key), error.schema.get("properties", {}).get(key, {}), schema)
                for key in error.validator_value
                if key not in error.instance
            ]
        elif error.validator in ("anyOf", "oneOf"):
            problems += _nearest_form(error, data, schema, root)
        else:
            problems.append(Problem((*root, *path), *_json_words(error)))
    return list(dict.fromkeys(problems))


def _json_words(error: Any) -> tuple[str, str]:
    """What and mend for an error of jsonschema about one value."""
    value, wanted = error.instance, error.validator_value
    if error.validator == "type":
        kinds = wanted if isinstance(wanted, list) else [wanted]
        what = f"must be {' or '.join(KINDS[kind] for kind in kinds)}, is {show(value)}"
        return what, type_mend(kinds[0], value)
    if error.validator in ("enum", "const"):
        options = wanted if isinstance(wanted, list) else [wanted]
        return f"must be {choice([str(o) for o in options])}, is {show(value)}", near(
            value, [str(o) for o in options]
        )
    if error.validator in _JSON_LIMITS:
        return f"must be {_JSON_LIMITS[error.validator]} {wanted:.15g}, is {show(value)}", ""
    if error.validator in (
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minProperties",
        "maxProperties",
    ):
        words = "at least" if error.validator.startswith("min") else "at most"
        return f"must hold {words} {wanted}, holds {len(value)}", ""
    if error.validator == "pattern":
        return f"{value!r} is not written as it must be", pattern_mend(value, error.schema, wanted)
    return f"does not fit: {error.validator} {str(wanted)[:60]}", ""


def _nearest_form(error: Any, data: Any, schema: JsonSchema, root: Path) -> list[Problem]:
    """Alternatives: report those of the kind that was written, else all kinds there are."""
    forms: dict[int, list] = {}
    for inner in error.context:
        forms.setdefault(inner.relative_schema_path[0], []).append(inner)
    same_kind = [
        errors
        for errors in forms.values()
        if not any(inner.validator == "type" and not inner.relative_path for inner in errors)
    ]
    if same_kind:
        return from_jsonschema(min(same_kind, key=len), data, schema, root)
    kinds = [
        KINDS[kind]
        for errors in forms.values()
        for inner in errors
        if inner.validator == "type" and not inner.relative_path
        for kind in (
            [inner.validator_value] if isinstance(inner.validator_value, str) else inner.validator_value
        )
    ]
    words = " or ".join(dict.fromkeys(kinds))
    return [Problem((*root, *error.absolute_path), f"must be {words}, is {show(error.instance)}")]
