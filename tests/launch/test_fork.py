"""A run that begins at a checkpoint of another one: what it takes over, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import STACK, fresh_home, stack, task_file

from stackrl.runtime import checkpoints
from stackrl.runtime.launch import fork as forking
from stackrl.runtime.launch.fork import fork
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.run import RunError, RunFolder, State, all_runs, create_run
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

WARMUP, MAIN = STACK["stages"]
"""20 supervised steps, then 60 of reinforcement learning."""
SAVED = (20, 25, 30)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.fixture
def parent(tmp_path: Path) -> RunFolder:
    return saved_run(tmp_path)


def saved_run(folder: Path, **changes: Any) -> RunFolder:
    """A run of this stack with checkpoints at SAVED; the last one has an open group of finished rollouts."""
    file = task_file(folder, **({"checkpoint": {"keep": 9}} | changes))
    run = create_run("fake", file, "hash", stack(checkpoint={"keep": 9}, **changes), {}, {"A": "b"})
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    journal = Journal(run.journal, 4)
    metrics, events = [], []
    for index in range(max(SAVED)):
        rl = index >= 20
        place = Place(4, index, max(0, index - 20), "main" if rl else "warmup", index - 20 * rl, False, False)
        groups = []
        if rl:
            open_group(journal, index)
            groups = [index]
        journal.seal(place, "rl" if rl else "supervised", groups)
        journal.apply(index)
        metrics.append({"index": index, "stage": place.stage, "reward": index / 100, "time": float(index)})
        if index + 1 in SAVED:
            open_group(journal, 100 + index)
            save(run, journal, index + 1)
            events.append({"event": "checkpoint", "index": index + 1, "time": float(index)})
    journal.close()
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in metrics))
    run.events.write_text("".join(json.dumps(record) + "\n" for record in events))
    run.write_state(State("stopped", attempt=2, incarnation=6))
    return run


def open_group(journal: Journal, group: int) -> None:
    journal.plan(Plan(group, "main", group, "reverse", 0, 2))
    for number in range(2):
        journal.finish(
            Rollout(
                group=group,
                number=number,
                environment="reverse",
                reward=0.5,
                samples=[],
                turns=1,
                sampled=1,
                metrics={},
                prefix_breaks=0,
            )
        )


def save(run: RunFolder, journal: Journal, index: int) -> None:
    checkpoint = checkpoints.folder(run.checkpoints(run.stack()), index)
    journal.snapshot(checkpoint / "orchestrator" / "journal.sqlite")
    (checkpoint / "orchestrator" / "stack.json").write_bytes((run.path / "stack.json").read_bytes())
    (checkpoint / "trainer").mkdir()
    (checkpoint / "trainer" / "weights.distcp").write_bytes(os.urandom(100))
    (checkpoint / "trainer" / "progress.json").write_text(json.dumps({"index": index, "step": index - 20}))
    checkpoints.write_manifest(checkpoint, {"index": index, "incarnation": 4, "used": 99.0})


def books(run: RunFolder, index: int) -> Path:
    return checkpoints.folder(run.checkpoints(run.stack()), index) / "orchestrator" / "journal.sqlite"


def states(journal: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(journal)) as db:
        return dict(db.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))


def problems_of(origin: str, source: Any, *changes: str) -> list[str]:
    with pytest.raises(StackError) as error:
        fork(origin, source, changes)
    return [str(problem) for problem in error.value.problems]


def test_a_fork_goes_on_at_the_checkpoint_with_what_was_changed(parent: RunFolder) -> None:
    run = fork(f"{parent.id}@25", None, ["stages.main.optimizer.learning_rate=0.5", "seed=7"])
    assert run.id != parent.id
    assert run.stack().stages[1].optimizer.learning_rate == 0.5 and run.stack().seed == 7
    newest = checkpoints.newest(run.checkpoints(run.stack()))
    assert newest is not None and newest.name == "step-000025" and newest.is_relative_to(run.path)
    theirs = checkpoints.folder(parent.checkpoints(parent.stack()), 25)
    for part in ("trainer/weights.distcp", "trainer/progress.json"):
        assert (newest / part).read_bytes() == (theirs / part).read_bytes()
        assert (newest / part).stat().st_ino == (theirs / part).stat().st_ino, "no second copy of the weights"
    stored = json.loads((newest / "orchestrator" / "stack.json").read_bytes())
    assert stored == run.read("stack.json") != parent.read("stack.json")
    assert (run.model / "config.json").read_text() == "{}"
    about = run.read("run.json")
    assert about["parent"] == {"run": parent.id, "step": 25} and about["environment"] == {"A": "b"}
    assert about["source"] == parent.read("run.json")["source"]


def test_its_hours_begin_anew_also_where_only_its_checkpoint_is_left(parent: RunFolder) -> None:
    run = fork(f"{parent.id}@20", None)
    newest = checkpoints.newest(run.checkpoints(run.stack()))
    assert newest is not None and checkpoints.verify(newest)["used"] == run.state().used == 0.0


def test_its_incarnations_are_above_all_of_the_parents(parent: RunFolder) -> None:
    state = fork(f"{parent.id}@20", None).state()
    assert (state.status, state.attempt, state.incarnation) == ("created", 0, 6)


def test_it_has_the_metrics_and_events_up_to_the_checkpoint(parent: RunFolder) -> None:
    run = fork(f"{parent.id}@25", None)
    assert [json.loads(line)["index"] for line in run.metrics.read_text().splitlines()] == list(range(25))
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(event["event"], event["index"]) for event in events] == [
        ("checkpoint", 20),
        ("checkpoint", 25),
        ("forked", 25),
    ]
    assert events[-1]["from"] == parent.id


def test_rollouts_that_no_step_had_trained_are_dropped_and_the_parents_books_stay(parent: RunFolder) -> None:
    before = states(books(parent, 25))
    assert before["finished"] == 4  # the open groups of steps 20 and 25
    run = fork(f"{parent.id}@25", None)
    journal = Journal(run.journal, 7, books(run, 25))
    assert journal.position().index == 25 and journal.position().stage_steps == {"warmup": 20, "main": 5}
    assert journal.open_groups("main") == []
    assert journal.states() == {"durable": 10, "dropped": 4}
    assert journal.next_prompt("main") > 124
    journal.close()
    with contextlib.closing(sqlite3.connect(books(run, 25))) as db:
        assert db.execute("SELECT DISTINCT reason FROM rollouts WHERE state = 'dropped'").fetchall() == [
            (forking.FORKED,)
        ]
    assert states(books(parent, 25)) == before
    checkpoints.verify(books(parent, 25).parents[1])


@pytest.mark.parametrize("origin", ["{run}@latest", "{run}", "latest@latest"])
def test_latest_is_the_newest_whole_checkpoint(parent: RunFolder, origin: str) -> None:
    newest = checkpoints.folder(parent.checkpoints(parent.stack()), 30)
    (newest / "trainer" / "weights.distcp").write_bytes(b"x" * 100)
    assert fork(origin.format(run=parent.id), None).read("run.json")["parent"]["step"] == 25


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("7", "has no checkpoint of step 7; there are 20, 25, 30: `--from {run}@30`"),
        ("last", "'last' is not a step of run {run}; there are 20, 25, 30"),
        ("25", "progress.json is damaged: its content is not what manifest.json lists; there are 20, 25, 30"),
    ],
)
def test_a_checkpoint_that_is_not_there_or_damaged(parent: RunFolder, step: str, expected: str) -> None:
    file = checkpoints.folder(parent.checkpoints(parent.stack()), 25) / "trainer" / "progress.json"
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(RunError) as error:
        fork(f"{parent.id}@{step}", None)
    assert expected.format(run=parent.id) in str(error.value)


def test_a_run_without_checkpoints(parent: RunFolder) -> None:
    shutil.rmtree(parent.checkpoints(parent.stack()))
    with pytest.raises(RunError, match="has no checkpoint; it is saved every 50 steps and at its end"):
        fork(f"{parent.id}@25", None)


@pytest.mark.parametrize(
    ("step", "changes", "expected"),
    [
        (25, ["model.architecture=llama", "model.config.max_position_embeddings=4096"], "model.architecture"),
        (25, ["model.tokenizer=bytes", "model.dtype=bfloat16"], "model.dtype: the run was made with"),
        (25, ["stages.main.name=other"], "stages.1: the run has begun the rl stage main in this place"),
        (
            25,
            ["stages.main.steps=4"],
            "stages.1.steps: the run has taken 5 steps of this stage; make it",
        ),
        (25, ["stages.warmup.steps=21"], "stages.0.steps: the run has taken all 20 steps of this stage"),
        (20, ["stages.warmup.steps=19"], "stages.0.steps: the run has taken 20 steps of this stage; make it"),
        (25, ["stages.main.steps=5"], "stages: the checkpoint is at step 25, where the stages end; add a"),
    ],
)
def test_what_no_checkpoint_fits_is_refused(
    parent: RunFolder, step: int, changes: list[str], expected: str
) -> None:
    told = problems_of(f"{parent.id}@{step}", None, *changes)
    assert any(expected in problem for problem in told), told
    assert all(
        f"start without `--from {parent.id}@{step}`" in problem for problem in told if "made" in problem
    )
    assert [run.id for run in all_runs()] == [parent.id]


def test_after_a_warmup_any_stage_may_follow_and_it_may_be_longer(parent: RunFolder) -> None:
    run = fork(f"{parent.id}@20", None, ["stages.main.name=other"])
    assert [stage.name for stage in run.stack().stages] == ["warmup", "other"]
    run = fork(f"{parent.id}@20", None, ["stages.warmup.steps=25"])
    assert run.stack().stages[0].steps == 25


def test_a_file_may_say_what_the_fork_does(parent: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    file = task_file(tmp_path / "new", algorithm={"group_size": 4, "batch_size": 16})
    run = fork(f"{parent.id}@30", load(file))
    assert run.stack().algorithm.group_size == 4 and run.read("run.json")["source"] == str(file)
    told = problems_of(f"{parent.id}@30", load(task_file(tmp_path / "new", stages=[MAIN])))
    assert told[0].startswith(f"{file}:") and "the run has begun the supervised stage warmup" in told[0]


def test_the_parents_file_may_be_gone_and_one_may_stand_elsewhere(
    parent: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake.yaml").unlink()
    monkeypatch.chdir("/")
    assert fork(f"{parent.id}@25", None, ["seed=3"]).stack().seed == 3


def test_a_fork_can_be_forked_and_keeps_what_it_was_given_on_the_command_line(parent: RunFolder) -> None:
    first = fork(f"{parent.id}@25", None, ["seed=3", "monitors.rollouts=null"])
    second = fork(f"{first.id}@25", None)
    assert second.stack().seed == 3 and second.stack().monitors.rollouts is None
    assert second.read("run.json")["parent"] == {"run": first.id, "step": 25}


def test_a_fork_that_fails_leaves_nothing(
    parent: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pruned(file: Path, target: Path, **_: bool) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(file))

    monkeypatch.setattr(forking, "_link", pruned)
    with pytest.raises(RunError, match="has deleted this one meanwhile"):
        fork(f"{parent.id}@25", None, [f"checkpoint.path={tmp_path / 'saved'}"])
    assert [run.id for run in all_runs()] == [parent.id]
    assert not list((tmp_path / "saved").glob("*/*"))


def test_checkpoints_on_another_disk_are_copied(parent: RunFolder) -> None:
    here = parent.path.stat().st_dev
    disks = [disk for disk in map(Path, ("/dev/shm", "/var/tmp")) if disk.is_dir()]
    other = next((disk / f"stackrl-test-{os.getpid()}" for disk in disks if disk.stat().st_dev != here), None)
    if other is None:
        pytest.skip("there is no other disk")
    try:
        run = fork(f"{parent.id}@25", None, [f"checkpoint.path={other}"])
        newest = checkpoints.newest(other / run.id)
        assert newest is not None and newest.name == "step-000025"
    finally:
        shutil.rmtree(other, ignore_errors=True)
