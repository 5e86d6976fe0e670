"""What a run's folder is given: paths that mean the same wherever the next attempt starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_roles import task_file

from stackrl.runtime.launch.admit import admit
from stackrl.runtime.run import RunFolder
from stackrl.schemas.loader import load
from stackrl.schemas.stack import Stack


def admitted(folder: Path, **changes: object) -> Stack:
    return admit(load(task_file(folder, **changes)))[0]


def test_folders_of_the_stack_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "house"))
    (tmp_path / "house" / "model").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    near = {"checkpoint": {"path": "saved"}, "weights": {"transport": "folder", "path": "w"}}
    far = {"checkpoint": {"path": "~/saved"}, "weights": {"transport": "folder", "path": "~/w"}}
    for root, changes in ((tmp_path, near), (tmp_path / "house", far)):
        stack = admitted(tmp_path, **changes)
        run = RunFolder(tmp_path / "a-run")
        monkeypatch.chdir("/")  # as an attempt that starts from elsewhere
        assert run.checkpoints(stack) == root / "saved" / "a-run"
        assert run.weights(stack) == root / "w" / "a-run"
        monkeypatch.chdir(tmp_path)
    assert admitted(tmp_path, model={"id": "model"}).model.id == str(tmp_path / "model")
    assert admitted(tmp_path, model={"id": "~/model"}).model.id == str(tmp_path / "house" / "model")


def test_a_model_of_the_hub_and_folders_of_the_run_stay_as_they_are(tmp_path: Path) -> None:
    stack = admitted(tmp_path, model={"id": "owner/name"})
    assert (stack.model.id, stack.checkpoint.path) == ("owner/name", None)
