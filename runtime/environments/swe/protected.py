"""Files that a solution has no say in: tests, and whatever decides how tests are run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Set

_NAMES = frozenset(
    {
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        ".coveragerc",
    }
)
_ENDINGS = (".pth", ".pyc", ".pyo", ".egg-link")
_METADATA = (".dist-info", ".egg-info", ".egg")
"""Of what looks like an installed package: it could bring plugins of pytest."""
_STEMS = re.compile(r"conftest|sitecustomize|usercustomize|tests?|test_.*|.*_test")


def protected(paths: Iterable[str], first: Set[str], tests: Set[str], solution: Set[str]) -> set[str]:
    """Those of ``paths`` whose change by a solution is undone.

    ``first`` are the paths of the repository as it was, ``tests`` those of the task's tests. What the task's
    own ``solution`` changes may be changed, as may a folder `test` or `tests` that it changes something in.
    """
    open_folders = {folder for path in solution for folder in _test_folders(path)}
    return {
        path
        for path in paths
        if path in tests
        or (path not in solution and _is_protected(path, open_folders))
        or (path not in first and _hides_a_standard_module(path))
    }


def _is_protected(path: str, open_folders: set[str]) -> bool:
    *folders, name = path.split("/")
    if name in _NAMES or name.endswith(_ENDINGS) or "__pycache__" in folders:
        return True
    if any(part.endswith(_METADATA) for part in (*folders, name)):
        return True
    # a folder or a compiled module named as a test would be imported in its place
    opened = {folder.rpartition("/")[2] for folder in _test_folders(path) & open_folders}
    return any(_STEMS.fullmatch(stem) for stem in {*folders, name.partition(".")[0]} - opened)


def _test_folders(path: str) -> set[str]:
    """Folders named `test` or `tests` above a path."""
    folders = path.split("/")[:-1]
    return {"/".join(folders[: n + 1]) for n, folder in enumerate(folders) if folder in ("test", "tests")}


def _hides_a_standard_module(path: str) -> bool:
    top = path.partition("/")[0]
    return top.partition(".")[0] in sys.stdlib_module_names
