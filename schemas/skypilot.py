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
CHOICES = ("any_of", "ordered")
"""Keys of `resources` whose entries are alternatives; an entry inherits what stands beside them."""
PLACES = ("cloud", "region", "zone")
"""Older keys of `resources` for what `infra` says in one word."""


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
    return gpus_of(task.get("resources") or {})


def gpus_of(resources: Mapping[str, Any]) -> list[tuple[str, int]]:
    """As gpus_of_node, of `resources` alone."""
    choices = resources.get("any_of") or resources.get("ordered") or [{}]
    found = [_accelerators(choice.get("accelerators", resources.get("accelerators"))) for choice in choices]
    return [kind for kinds in found for kind in kinds]


def choices_of(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every alternative that ``resources`` allow, with all that it inherits; one where there is no choice."""
    outer = {key: value for key, value in resources.items() if key not in CHOICES}
    choices = next((resources[key] for key in CHOICES if resources.get(key)), [{}])
    return [{**outer, **choice} for choice in choices]


def infra_of(choice: Mapping[str, Any]) -> str:
    """Where an alternative is: its `infra`, or the older `cloud`, `region` and `zone`; empty: anywhere."""
    if said := choice.get("infra"):
        return said
    parts = [choice.get(key) for key in PLACES]
    while parts and not parts[-1]:
        parts.pop()
    return "/".join(part or "*" for part in parts)


def laid_over(resources: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``resources`` as a role has them that says ``own`` besides: its words win, also inside the choices of
    `any_of` and `ordered`; choices of its own take the place of those. Choices that become equal are one."""
    if any(key in own for key in CHOICES):
        return {key: value for key, value in resources.items() if key not in CHOICES} | dict(own)
    merged = {**resources, **own}
    for key in CHOICES:
        if choices := resources.get(key):
            different: list[dict[str, Any]] = []
            for choice in choices:
                if (laid := {**choice, **own}) not in different:
                    different.append(laid)
            merged[key] = different
    return merged


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
