"""Runs that go on: of a managed job that is started again, and of a machine that is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import fresh_home, task_file

from stackrl.runtime import assignment, checkpoints, node
from stackrl.runtime.launch import local
from stackrl.runtime.launch.again import recreate
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.place import Place, job_run_id
from stackrl.runtime.run import RunError, RunFolder, all_runs
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SKYPILOT_MANAGED_JOB_ID", raising=False)
    monkeypatch.delenv("SKYPILOT_JOB_RANK", raising=False)
    with fresh_home(tmp_path, monkeypatch):
        yield


def stack_file(folder: Path, **changes: Any) -> Path:
    return task_file(folder, checkpoint={"path": str(folder / "saved")}, **changes)


def save(folder: Path, run_id: str, index: int, incarnation: int, used: float = 0.0) -> Path:
    """A complete checkpoint of a run."""
    checkpoint = checkpoints.folder(folder / "saved" / run_id, index)
    (checkpoint / "orchestrator").mkdir(parents=True)
    step = {"index": index - 1, "stage": "warmup"}
    (checkpoint / "orchestrator" / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (checkpoint / "orchestrator" / "events.jsonl").write_text('{"event": "stage_started", "time": 1.0}\n')
    stack = load(stack_file(folder)).stack
    (checkpoint / "orchestrator" / "stack.json").write_text(stack.model_dump_json())
    checkpoints.write_manifest(checkpoint, {"index": index, "incarnation": incarnation, "used": used})
    return checkpoint


def test_a_run_whose_folder_is_lost_goes_on_from_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_start_node", lambda run, claims: subprocess.Popen(["true"]))
    save(tmp_path, "fake-1", 5, incarnation=2, used=300.0)
    newest = save(tmp_path, "fake-1", 10, incarnation=4, used=700.5)
    (newest / "orchestrator" / "metrics.jsonl").write_text("damaged")
    loaded = load(stack_file(tmp_path, roles={"trainer": {"processes": 2}, "inference": {"processes": 1}}))
    assert local.launch(loaded, detach=True, resume="fake-1") == 1  # `true` is no node program
    assert "its folder was gone" in capsys.readouterr().err
    [run] = all_runs()
    assert run.id == "fake-1" and run.state().incarnation == 4  # its next life is the fifth
    assert run.state().used == 700.5, "limits.hours counts what was lost too"
    assert [json.loads(line)["index"] for line in run.metrics.read_text().splitlines()] == [4]
    assert run.events.exists() and run.events.stat().st_mode & 0o777 == 0o600
    assert run.restore() == tmp_path / "saved" / "fake-1" / "step-000005"
    assert [p["role"] for p in run.read("plan.json")["processes"]].count("trainer") == 2
    assert not run.model.exists()  # it is prepared anew


def test_a_run_that_has_used_its_hours_does_not_get_them_again_by_losing_its_folder(tmp_path: Path) -> None:
    save(tmp_path, "fake-1", 5, incarnation=1, used=3700.0)
    run = recreate("fake-1", load(stack_file(tmp_path, limits={"hours": 1})))
    assert run is not None
    with pytest.raises(RunError, match=r"has worked 1\.0 h of its 1 \(limits\.hours\)"):
        node.main(str(run.path))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seed": 8}, "seed: the run was made with 0"),
        (
            {"stages": [{"name": "other", "type": "rl", "steps": 60}]},
            "the run has begun the supervised stage",
        ),
    ],
)
def test_another_stack_is_refused_though_the_runs_folder_is_lost(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    save(tmp_path, "fake-1", 5, 1)
    with pytest.raises(StackError, match=complaint):
        recreate("fake-1", load(stack_file(tmp_path, **changes)))
    assert all_runs() == []


@pytest.mark.parametrize("path", [True, False])
def test_without_a_good_checkpoint_there_is_no_such_run(tmp_path: Path, path: bool) -> None:
    if path:
        (save(tmp_path, "fake-1", 5, 1) / "orchestrator" / "events.jsonl").unlink()
    loaded = load(stack_file(tmp_path) if path else task_file(tmp_path))
    assert recreate("fake-1", loaded) is None
    with pytest.raises(RunError):
        local.launch(loaded, detach=True, resume="fake-1")
    with pytest.raises(RunError):
        local.launch(None, detach=True, resume="fake-1")
    assert all_runs() == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SKYPILOT_MANAGED_JOB_ID": "12"}, "a-run-job12"),
        ({"SKYPILOT_MANAGED_JOB_ID": "12", "SKYPILOT_JOB_RANK": "3"}, "a-run-job12-3"),
        ({"SKYPILOT_JOB_RANK": "3"}, None),
    ],
)
def test_a_managed_job_has_one_run(variables: dict[str, str], expected: str | None) -> None:
    assert job_run_id("a run", variables) == expected


def run_of(file: Path) -> RunFolder:
    return assignment.run_of(load(file), Place(), make_plan)


def test_a_managed_job_that_is_started_again_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYPILOT_MANAGED_JOB_ID", "7")
    first = run_of(stack_file(tmp_path))
    assert first.id == "fake-job7" and first.state().incarnation == 0
    state = first.state()
    state.status, state.attempt, state.incarnation = "running", 1, 3
    first.write_state(state)
    changed = stack_file(tmp_path, roles={"trainer": {"processes": 2}, "inference": {"processes": 1}})
    second = run_of(changed)
    assert second.id == first.id and second.state() == state
    assert second.stack().roles.trainer.processes == 2
    with pytest.raises(StackError, match="the run was made with"):
        run_of(stack_file(tmp_path, seed=5))
    shutil.rmtree(first.path)  # another machine
    save(tmp_path, first.id, 5, incarnation=3)
    third = run_of(changed)
    assert third.id == first.id and third.state().incarnation == 3 and third.metrics.exists()


@pytest.mark.slow
def test_a_managed_job_whose_run_is_finished_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYPILOT_MANAGED_JOB_ID", "7")
    run = run_of(stack_file(tmp_path))
    state = run.state()
    state.status, state.ended = "finished", 1.0
    run.write_state(state)
    program = (
        f"import sys; from stackrl.runtime import node; sys.exit(node.main({str(tmp_path / 'fake.yaml')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and f"run {run.id} finished" in ended.stderr
    monkeypatch.delenv("SKYPILOT_MANAGED_JOB_ID")
    with pytest.raises(RunError, match="is finished"):
        node.main(str(run.path))
