"""The orchestrator killed with SIGKILL at each point of a step, under a trainer that lives on, or with it."""

from __future__ import annotations

import contextlib
import io
import signal
import sqlite3
import time
from collections import Counter

import killed_orchestrator
import pytest
from fake_trainer import FakeTrainer
from rich.console import Console
from small_runs import STACK, TOKEN, begin_attempt, lines, make_run

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.audit import audit
from stackrl.runtime.monitor.records import Reader
from stackrl.runtime.monitor.report_facts import facts
from stackrl.runtime.monitor.view import plain, render
from stackrl.runtime.transport.messages import encode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, WARMUP, GROUPS, SIZE = 8, 2, 24, 4
BARRIER = STACK["algorithm"] | {"max_staleness": 0}
EVERY_POINT = [
    ("sealed", 0),
    ("taken", 1),
    ("acknowledged", 2),
    ("applied", 3),
    ("sealed", 4),
    ("told", 4),
    ("taken", 5),
    ("cutting", 5),
    ("cut", 5),
    ("declared", 5),
    ("durable", 5),
    ("acknowledged", 6),
    ("told", 7),
    ("cut", 7),
]
"""Supervised and RL steps; 2, 5 and 7 end with a checkpoint."""


@pytest.fixture(scope="module")
def lives():
    with killed_orchestrator.Lives() as lives:
        yield lives


def wait_until(condition, within=60):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def rows(run, sql):
    with contextlib.closing(sqlite3.connect(run.journal / "journal.sqlite")) as db:
        return db.execute(sql).fetchall()


def check_books(run, trainer):
    """Every step was taken once, every rollout trained once, in the lineage that survived."""
    assert sorted(map(int, trainer.trained)) == list(range(STEPS))
    assert {index: len(times) for index, times in trainer.trained.items() if len(times) != 1} == {}
    trained = Counter(
        document
        for index, [documents] in trainer.trained.items()
        if int(index) >= WARMUP
        for document in documents
    )
    booked = {
        f"{group}-{number}": batch
        for group, number, batch in rows(run, "SELECT group_id, number, batch FROM rollouts")
    }
    assert trained == Counter(booked.keys()) and len(booked) == GROUPS * SIZE
    for index, [documents] in trainer.trained.items():
        assert all(booked[name] == int(index) for name in documents if name in booked)
    prompts = rows(run, "SELECT stage, number FROM groups")
    assert sorted(prompts) == [("main", number) for number in range(GROUPS)], "a prompt was lost or repeated"
    assert rows(run, "SELECT DISTINCT state FROM rollouts") == [("durable",)]
    assert rows(run, "SELECT id FROM batches WHERE state = 'durable'") == [(index,) for index in range(STEPS)]
    newest = checkpoints.newest(run.checkpoints(run.stack()))
    assert checkpoints.index_of(newest) == STEPS
    assert {path.name for path in (newest / "orchestrator").iterdir()} == {
        "journal.sqlite",
        "metrics.jsonl",
        "events.jsonl",
        "stack.json",
    }
    assert [record["index"] for record in lines(newest / "orchestrator" / "metrics.jsonl")][-1] == STEPS - 1
    run.write("plan.json", {"processes": []})
    audited = audit(run)
    assert audited.clean and audited.steps.all == STEPS, str(audited)
    assert not trainer.errors and {end.reason for end in trainer.ended} == {"finished"}


def check_views(run):
    """What is not known of a step is left out by all that show it."""
    reader = Reader(run)
    reader.read()
    screen = Console(file=io.StringIO(), width=120)
    screen.print(render(reader.history, time.time(), 120))
    assert f"{STEPS}/{STEPS}" in screen.file.getvalue()
    told = [plain(reader.history, record) for record in reader.history.steps]
    assert "– tokens/s" in told[0]
    curves = facts(run)["curves"]
    assert curves["from"] == list(range(STEPS)) and curves["columns"]["seconds_step"][0] is None


def test_killed_at_every_point_under_a_trainer_that_lives_on(lives, tmp_path):
    """The trainer takes the very batches that it would have taken, each once, and its numbers are kept."""
    whole = make_run(tmp_path / "whole", algorithm=BARRIER)
    with FakeTrainer(whole, TOKEN, ranks=2) as unbroken:
        lives.finished(whole)
    run = make_run(tmp_path / "broken", algorithm=BARRIER)
    with FakeTrainer(run, TOKEN, ranks=2, step_delay=2 * killed_orchestrator.IN_HAND) as trainer:
        for point, step in EVERY_POINT:
            lives.killed(run, point, step)
        lives.finished(run)
    check_books(run, trainer)
    for index in range(STEPS):
        for rank in range(2):
            assert encode(trainer.batches[index][rank]) == encode(unbroken.batches[index][rank])
    told = lines(run.metrics)
    assert [record["index"] for record in told] == list(range(STEPS))
    unknown = [record["index"] for record in told if "seconds_step" not in record]
    assert {0, 1, 2, 3} <= set(unknown), "who is killed in a step does not know how long it took"
    check_views(run)
    assert all(record["trainer/loss"] == 0.5 for record in told), "the trainer repeats what was not heard"
    assert [record.get("rollouts") for record in told] == [None] * WARMUP + [16] * (STEPS - WARMUP)
    before = [record for record in lines(whole.metrics)]
    assert [record.get("reward") for record in told] == [record.get("reward") for record in before]
    assert rows(run, "SELECT COUNT(*) FROM batches WHERE applied_at >= sealed_at AND incarnation = 1") == [
        (STEPS,)
    ]
    tokens = [
        sum(len(micro.tokens) for batch in trainer.batches[index].values() for micro in batch.micro_batches)
        for index in range(STEPS)
    ]
    assert [count for (count,) in rows(run, "SELECT packed_tokens FROM batches ORDER BY id")] == tokens


@pytest.mark.parametrize(("point", "step"), [("sealed", 4), ("acknowledged", 4), ("cut", 5)])
def test_killed_with_its_trainer(lives, tmp_path, point, step):
    """Asynchronous work goes back to the checkpoint's cut, and what came after is done again."""
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN):
        lives.killed(run, point, step)
    begin_attempt(run)
    with FakeTrainer(run, TOKEN) as second:
        assert second.start == 3
        lives.finished(run)
    check_books(run, second)


def test_the_check_finds_a_journal_that_was_not_rolled_back(lives, tmp_path, monkeypatch):
    """Negative control: batches are rolled back, but what became of the rollouts is not."""
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN):
        lives.killed(run, "acknowledged", 5)
    begin_attempt(run)
    with contextlib.closing(sqlite3.connect(run.journal / "journal.sqlite")) as db, db:
        db.execute("DELETE FROM batches WHERE id >= 3")
        db.execute("UPDATE meta SET incarnation = 2")
    with FakeTrainer(run, TOKEN) as second:
        lives.whole(run)
    with pytest.raises(AssertionError):
        check_books(run, second)


def test_a_trainer_of_the_checkpoint_does_not_fit_a_journal_that_went_on(lives, tmp_path):
    """Negative control: a journal that is not rolled back at all is found out before the first batch."""
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN):
        lives.killed(run, "told", 4)
    begin_attempt(run)
    with contextlib.closing(sqlite3.connect(run.journal / "journal.sqlite")) as db, db:
        db.execute("UPDATE meta SET incarnation = 2")
    with FakeTrainer(run, TOKEN) as second, lives.living(run) as orchestrator:
        wait_until(lambda: second.errors or orchestrator.poll() is not None)
    assert "resumes at optimizer step 3, the orchestrator at 5" in str(second.errors[0])


def test_sigusr2_saves_and_ends(lives, tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 100})
    with FakeTrainer(run, TOKEN, step_delay=0.3) as trainer, lives.living(run) as orchestrator:
        wait_until(lambda: len(trainer.batches) == 4)
        orchestrator.send_signal(signal.SIGUSR2)
        assert orchestrator.wait(timeout=30) == 0
        wait_until(lambda: trainer.ended)
    newest = checkpoints.newest(run.checkpoints(run.stack()))
    assert checkpoints.index_of(newest) == len(trainer.batches) >= 4
    begin_attempt(run)
    with FakeTrainer(run, TOKEN) as second:
        assert second.start == len(trainer.batches)
        lives.finished(run)
    check_books(run, second)


@pytest.mark.parametrize("finite", [True, False])
def test_a_guard_ends_the_run_for_good(lives, tmp_path, finite):
    run = make_run(tmp_path, checkpoint={"every": 2})
    with FakeTrainer(run, TOKEN) as trainer:
        trainer.metrics = trainer.metrics | {"loss": float("nan"), "weights_finite": float(finite)}
        code, stderr = lives.whole(run)
    assert code == 3 and stderr.splitlines()[-1].startswith("error: guard not_finite: ")
    saved = checkpoints.newest(run.checkpoints(run.stack()))
    taken = len(trainer.batches)
    assert taken < STEPS and [end.save for end in trainer.ended] == [finite and taken % 2 > 0]
    assert (checkpoints.index_of(saved) == taken) if finite else saved is None
