"""SkyPilot's own keys, checked against SkyPilot's own schema.

skypilot.schema.json is a copy of what SkyPilot 0.14 checks a task with: its task schema, with its
resources schema in place of the bare object. tests/sky compares the copy with the original;
`.venv-sky/bin/python schemas/skypilot.py` writes it anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COPY = Path(__file__).parent / "skypilot.schema.json"


def task_schema() -> dict[str, Any]:
    """The copy."""
    return json.loads(COPY.read_bytes())


def original() -> dict[str, Any]:
    """The schema as the installed SkyPilot has it (only where SkyPilot is installed)."""
    from sky.utils import schemas

    task = json.loads(json.dumps(schemas.get_task_schema()))
    resources = json.loads(json.dumps(schemas.get_resources_schema()))
    resources.pop("$schema", None)
    task["properties"]["resources"] = resources
    return task


def as_checked(task: Mapping[str, Any]) -> dict[str, Any]:
    """The task as SkyPilot's schema sees it: SkyPilot turns the values of `envs` into text first."""
    envs = task.get("envs")
    if not isinstance(envs, Mapping):
        return dict(task)
    return {**task, "envs": {key: _text(value) for key, value in envs.items()}}


def nodes(task: Mapping[str, Any]) -> int:
    return task.get("num_nodes") or 1


def gpus_of_node(task: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(name, count per node) of every kind of machine that `resources` allows; empty without accelerators."""
    resources = task.get("resources") or {}
    choices = resources.get("any_of") or resources.get("ordered") or [{}]
    found = [_accelerators(choice.get("accelerators", resources.get("accelerators"))) for choice in choices]
    return [kind for kinds in found for kind in kinds]


def _accelerators(value: Any) -> list[tuple[str, int]]:
    if isinstance(value, Mapping):
        return [(name, int(count or 1)) for name, count in value.items()]
    if isinstance(value, list):
        return [kind for item in value for kind in _accelerators(item)]
    if not isinstance(value, str):
        return []
    name, _, count = value.partition(":")
    return [(name.strip(), int(count) if re.fullmatch(r"\s*\d+\s*", count) else 1)]


def _text(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return str(value)
    return value


if __name__ == "__main__":
    COPY.write_text(json.dumps(original(), indent=1) + "\n")
