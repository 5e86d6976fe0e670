"""A run that was forked from a checkpoint goes on to its end, and its books are clean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import crashing
import pytest
import trials
from fake_roles import fresh_home, task_file

from stackrl.runtime import checkpoints
from stackrl.runtime.launch import fork as forking
from stackrl.runtime.launch.audit import audit
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def admitted(loaded: LoadedStack, *, here: bool = True) -> tuple[Stack, Any]:
        """With the light roles of these trials."""
        return loaded.stack, {"processes": [asdict(process) for process in trials.processes_of(loaded.stack)]}

    monkeypatch.setattr(forking, "admit", admitted)
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.fixture
def parent(tmp_path: Path) -> RunFolder:
    model = tmp_path / "model"
    byte_tokenizer(256).save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 32}')
    run = trials.make_run(tmp_path, model, [])
    (run.path / "source.yaml").write_text(task_file(tmp_path, **trials.STACK).read_text())
    assert trials.live(run) == 1
    return run


def go_on(parent: RunFolder, step: int, *changes: str) -> RunFolder:
    run = forking.fork(f"{parent.id}@{step}", None, changes)
    crashing.write(run.path, [])
    assert trials.live(run) == 1
    assert run.state().incarnation == parent.state().incarnation + 1
    return run


def test_other_groups_and_another_seed_from_the_middle_of_a_stage(parent: RunFolder) -> None:
    run = go_on(parent, 6, "seed=9", "algorithm.group_size=4", "algorithm.batch_size=8")
    books = trials.check(run).as_json()
    assert set(books["rollouts"]["dropped"]) <= {"forked"}
    assert trials.check(parent).clean


def test_more_steps_from_the_end_of_a_finished_run(parent: RunFolder) -> None:
    run = go_on(parent, 9, "stages.main.steps=10")
    books = audit(run)
    assert books.clean, books
    assert books.as_json()["steps"]["stages"] == {"warmup": 2, "main": 10}
    newest = checkpoints.newest(run.checkpoints(run.stack()))
    assert newest is not None and newest.name == "step-000012"
