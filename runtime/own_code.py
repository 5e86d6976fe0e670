"""Code of the user that a stack names: a loss, an advantage, a reward, an environment."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

PATTERN = r"^[^:\s]+(:[A-Za-z_][A-Za-z0-9_.]*)?$"
"""Of what `load` takes, as a regular expression of JSON Schema."""


class OwnCodeError(ValueError):
    """What a stack names is not there, or cannot be imported. The text says what was looked for and why."""


def load_function(path: str, group: str = "") -> Callable[..., Any]:
    """As `load`; what is found can be called."""
    found = load(path, group)
    if not callable(found):
        raise OwnCodeError(f"{path} is {type(found).__name__}, not a function")
    return found


def load(path: str, group: str = "") -> Any:
    """What ``path`` names: ``package.module:name``, ``folder/file.py:name``, or an entry point of ``group``.

    A relative file is looked for in the work directory, and so is a module that is not installed, also one
    that the file imports.
    """
    if ":" not in path:
        if not group:
            raise OwnCodeError(f"{path} names no function; say {path}:function")
        return _entry_point(path, group)
    place, _, name = path.rpartition(":")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise OwnCodeError(f"{path}: {place} has no {name}; it was read from {module.__file__}")
        found = getattr(found, part)
    return found


def _entry_point(name: str, group: str) -> Any:
    points = entry_points(group=group)
    if name not in points.names:
        known = f"there are {', '.join(sorted(points.names))}" if points else "there are none"
        raise OwnCodeError(
            f"{name}: no installed package has an entry point of this name in {group} ({known}); "
            "say module:function, or install the package"
        )
    try:
        return points[name].load()
    except (Exception, SystemExit) as error:
        raise OwnCodeError(f"{name}: {_reason(error)}") from error


def _module(name: str) -> ModuleType:
    """An installed module, or one of the work directory."""
    here = _look_here()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise OwnCodeError(
            f"{name} cannot be imported: {_reason(error)}; it was looked for in {here} too"
        ) from error


def _look_here() -> str:
    """Have imports find what is in the work directory; it comes last, so that it hides nothing else."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return here


def _file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise OwnCodeError(f"there is no file {path}")
    name = f"stackrl_own_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _look_here()
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise OwnCodeError(f"{path} cannot be imported: {_reason(error)}") from error
    return module


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
