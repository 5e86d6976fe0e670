"""The JSON Schema of a stack file: SkyPilot's task with the stack inside, for editors and other programs.

Generated: the typed models are the truth, their docstrings and the text under each field its descriptions.
`make schema` writes it to schemas/stack.schema.json.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

from stackrl.runtime.environments import schema_of
from stackrl.schemas import skypilot
from stackrl.schemas.environments import EnvironmentType
from stackrl.schemas.problems import STACK
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import CHANGED

CHANGE = "Change"
"""Ends the names of models that hold what a stage changes (schemas/stages.py)."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def stack_schema() -> dict[str, Any]:
    """Schema of what stands under `_metadata.stack`, described."""
    schema = Stack.model_json_schema()
    schema["$defs"]["Stack"] = {key: value for key, value in schema.items() if key != "$defs"}
    documented = descriptions()
    for name, model in schema["$defs"].items():
        fields = documented.get(name) or {
            key: text for changed in changed_by(name) for key, text in documented[changed].items()
        }
        for key, field in model.get("properties", {}).items():
            field.pop("title", None)
            text = fields.get(key) or _own_description(field, schema["$defs"])
            if text:
                field["description"] = field["markdownDescription"] = text
    schema["$defs"]["Environment"]["allOf"] = [_arguments(kind) for kind in get_args(EnvironmentType)]
    return {"$ref": "#/$defs/Stack", "$defs": schema["$defs"]}


def changed_by(name: str) -> list[str]:
    """The models that a model called ``name`` can be a change of."""
    return [
        model.__name__ for change, models in CHANGED.items() for model in models if change.__name__ == name
    ]


def file_schema() -> dict[str, Any]:
    """Schema of a whole stack file."""
    schema = _without_inline_flags(skypilot.task_schema())
    stack = stack_schema()
    schema["properties"][STACK[0]] = {
        "type": "object",
        "description": "Left alone by SkyPilot; the stack lives here.",
        "properties": {STACK[1]: {"$ref": "#/$defs/Stack"}},
        "required": [STACK[1]],
    }
    schema["properties"]["envs"] = {
        **schema["properties"]["envs"],
        "properties": {"STACK": {"type": "string", "description": "This file, as seen from `workdir`."}},
        # SkyPilot turns numbers into text before it checks
        "patternProperties": {
            pattern: {"type": ["string", "number", "boolean", "null"]}
            for pattern in schema["properties"]["envs"]["patternProperties"]
        },
    }
    for role in ("TrainerRole", "EngineRole"):
        own = stack["$defs"][role]["properties"]["resources"]
        own["anyOf"] = [{"$ref": "#/properties/resources"}, {"type": "null"}]
    return {
        **schema,
        "$schema": DIALECT,
        "title": "stackrl stack",
        "required": [STACK[0]],
        "$defs": stack["$defs"],
    }


def descriptions() -> dict[str, dict[str, str]]:
    """Model → field → the string that follows the field in the source."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = {key: text for key, text in _fields(node, found)}
    return found


def _fields(model: ast.ClassDef, known: dict[str, dict[str, str]]):
    for base in model.bases:  # a base stands above in the same file
        if isinstance(base, ast.Name):
            yield from known.get(base.id, {}).items()
    for field, after in zip(model.body, model.body[1:], strict=False):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
            yield field.target.id, " ".join(str(after.value.value).split())


def _arguments(kind: str) -> dict[str, Any]:
    """Where `type` is ``kind``, `args` follow the schema that the environment declares."""
    arguments = {"properties": {"args": schema_of(kind)}}
    if schema_of(kind).get("required"):
        arguments["required"] = ["args"]
    return {"if": {"properties": {"type": {"const": kind}}, "required": ["type"]}, "then": arguments}


def _own_description(field: dict[str, Any], models: dict[str, Any]) -> str:
    """A field that is a section of its own says what its model says."""
    name = field.get("$ref", "").rpartition("/")[2]
    return " ".join(models[name].get("description", "").split()) if name in models else ""


def _without_inline_flags(value: Any) -> Any:
    """Editors' regular expressions have no `(?i:…)`: spell both cases of each letter."""
    if isinstance(value, dict):
        return {key: _without_inline_flags(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_inline_flags(item) for item in value]
    if isinstance(value, str) and "(?i:" in value:
        both = lambda match: f"[{match[0].lower()}{match[0].upper()}]"  # noqa: E731
        any_case = lambda match: f"(?:{re.sub('[a-zA-Z]', both, match[1])})"  # noqa: E731
        return re.sub(r"\(\?i:((?:\([^()]*\)|[^()])*)\)", any_case, value)
    return value
