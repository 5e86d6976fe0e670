"""An environment of the user's own: a class by import path, or an entry point of an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stackrl.runtime.environments.base import Environment

GROUP = "stackrl.environments"
"""Of entry points."""
IMPORT_PATH = r"^([^:\s]+:[A-Za-z_][\w.]*|[A-Za-z_][\w.-]*)$"
"""What a path to code looks like."""


class Python(Environment):
    """Stands for the class that ``path`` names; it is made in its place."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "pattern": IMPORT_PATH,
                "description": "The class: folder/file.py:Class, package.module:Class, or the name of an "
                f"entry point of the group `{GROUP}`.",
                "examples": ["my_environment.py:Countdown"],
            },
            "args": {"type": "object", "description": "What the class is made with."},
        },
        "required": ["path"],
        "additionalProperties": False,
    }

    @classmethod
    def made(cls, args: Mapping[str, Any]) -> Environment:
        from stackrl.runtime.own_code import load

        path, own = args["path"], args.get("args", {})
        kind = load(path, GROUP)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise ValueError(
                f"{path} is no environment: derive the class from TurnEnvironment or AgentEnvironment of "
                "stackrl.runtime.environments.base"
            )
        if hasattr(kind, "schema"):
            _check(path, own, kind.schema)
        return kind.made(own)


def _check(path: str, args: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raises ValueError with the first thing that is wrong with ``args``."""
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(schema).iter_errors(args):
        place = ".".join(map(str, ("args", *error.absolute_path)))
        raise ValueError(f"{path}: {place}: {error.message}")
