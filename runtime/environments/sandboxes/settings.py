"""`args.sandbox` of environments: the schema of it, and what it says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stackrl.schemas.base import size_in_bytes

_SIZE = r"^[0-9]+(\.[0-9]+)?(B|KiB|MiB|GiB|TiB)$"

_BOUNDS: dict[str, Any] = {
    "type": {
        "enum": ["bubblewrap", "docker", "host"],
        "description": "What isolates the code: Linux namespaces, a container, or nothing at all.",
    },
    "memory": {
        "type": "string",
        "pattern": _SIZE,
        "description": "A size such as 512MiB, of all processes together; of each one where control groups "
        "cannot be made.",
    },
    "processes": {"type": "integer", "minimum": 8, "description": "Processes and threads at a time."},
    "file_size": {"type": "string", "pattern": _SIZE, "description": "A size such as 256MiB, of one file."},
    "disk": {
        "type": "string",
        "pattern": _SIZE,
        "description": "A size such as 2GiB, of all files together.",
    },
    "files": {"type": "integer", "minimum": 100, "description": "Files and folders together."},
    "timeout": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Seconds of one command; then all that it started is ended.",
    },
    "concurrent": {
        "type": "integer",
        "minimum": 1,
        "description": "Commands at a time in one worker; the others wait. By default one for each core.",
    },
}
_OWN: dict[str, dict[str, Any]] = {
    "bubblewrap": {
        "read": {
            "type": "array",
            "items": {"type": "string", "pattern": "^/"},
            "description": "Folders of the machine to be seen inside too, read-only: an interpreter with its "
            "packages, for example.",
        },
    },
    "docker": {
        "image": {
            "type": "string",
            "minLength": 1,
            "description": "Image of tasks that do not name one of their own.",
        },
        "user": {
            "type": "string",
            "minLength": 1,
            "description": "Who runs commands; by default the image's.",
        },
    },
    "host": {
        "unsafe_allow_host": {
            "const": True,
            "description": "Says that code of the model may do whatever this user may do, on this machine.",
        },
    },
}


def _variant(kind: str) -> dict[str, Any]:
    """Where `type` is ``kind``: its own keys and the common ones."""
    then: dict[str, Any] = {"properties": {**_BOUNDS, **_OWN[kind]}, "additionalProperties": False}
    if kind == "host":
        then["required"] = ["unsafe_allow_host"]
    return {"if": {"properties": {"type": {"const": kind}}, "required": ["type"]}, "then": then}


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": _BOUNDS["type"]},
    "required": ["type"],
    "allOf": [_variant(kind) for kind in _OWN],
    "description": "Where code of the model runs; docs/environments.md tells of the kinds and their keys.",
}
"""JSON Schema of ``args.sandbox``."""


@dataclass(frozen=True)
class Settings:
    """A checked `args.sandbox`. Sizes are bytes, times are seconds."""

    type: str
    memory: int = 2 << 30
    processes: int = 256
    file_size: int = 256 << 20
    disk: int = 2 << 30
    files: int = 200_000
    """Files and folders."""
    timeout: float = 60.0
    concurrent: int = 0
    """0: one for each core."""
    read: tuple[str, ...] = ()
    image: str = ""
    user: str = ""
    unsafe_allow_host: bool = False

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Settings:
        """Of ``args`` that follow SCHEMA. Raises ValueError where nothing isolates and nobody said it may."""
        values = {
            key: size_in_bytes(value) if key in ("memory", "file_size", "disk") else value
            for key, value in args.items()
        }
        values["read"] = tuple(values.get("read", ()))
        settings = cls(**values)
        if settings.type == "host" and not settings.unsafe_allow_host:
            raise ValueError(
                "sandbox: type host isolates nothing, code of the model would run as you; "
                "use bubblewrap or docker, or add unsafe_allow_host: true"
            )
        return settings

    @property
    def at_once(self) -> int:
        """Commands at a time."""
        return self.concurrent or os.cpu_count() or 1
