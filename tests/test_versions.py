"""A run knows what it was made with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_roles import make_run

from stackrl.runtime.versions import versions


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_the_work_directory_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "stack.yaml").write_text("a: 1\n")
    git(tmp_path, "add", "stack.yaml")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert versions(tmp_path)["commit"] == commit
    (tmp_path / "stack.yaml").write_text("a: 2\n")
    assert versions(tmp_path)["commit"] == f"{commit}+changes"


def test_without_a_repository_or_without_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert versions(tmp_path)["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions(Path(__file__).parent)["commit"] is None


def test_run_json_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    found = make_run().read("run.json")["versions"]
    assert set(found) == {"python", "stackrl", "torch", "vllm", "transformers", "commit"}
    assert found["stackrl"] and found["torch"] and found["vllm"]


def test_nothing_heavy_is_imported_for_them() -> None:
    program = (
        "import sys, pathlib; from stackrl.runtime.versions import versions; versions(pathlib.Path('.'));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
