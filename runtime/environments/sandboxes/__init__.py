"""Where code that a model wrote runs: bubblewrap, docker, or the machine itself.

A new kind is one file with a Machine and a Sandbox (see base.py), its keys in settings.py, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stackrl.runtime.environments.sandboxes.settings import SCHEMA, Settings

if TYPE_CHECKING:
    from stackrl.runtime.environments.sandboxes.base import Machine

KINDS = {"bubblewrap": "bubblewrap.Bubblewraps", "docker": "docker.Docker", "host": "host.Host"}
"""Where the machine of each kind stands in this package."""

__all__ = ["KINDS", "SCHEMA", "Settings", "machine"]


def machine(args: Mapping[str, Any]) -> Machine:
    """What `args.sandbox` asks for, not yet tried. Raises ValueError where it says too little."""
    settings = Settings.of(args)
    module, _, name = KINDS[settings.type].rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)(settings)
