"""Moving baselines and a curriculum survive the death of the orchestrator, and a rollback, unchanged."""

from __future__ import annotations

import contextlib
import sqlite3

import killed_orchestrator
import pytest
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, begin_attempt, lines, make_run

from stackrl.runtime.transport.messages import encode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 8
CHANGES = {
    "environments": [
        {"name": "short", "type": "reverse_text", "args": {"letters": [2, 2]}},
        {"name": "long", "type": "reverse_text", "args": {"letters": [6, 6]}},
    ],
    "algorithm": STACK["algorithm"]
    | {"max_staleness": 0, "advantage": {"type": "rae"}, "curriculum": {"decay": 0.5, "floor": 0.05}},
}


@pytest.fixture(scope="module")
def lives():
    with killed_orchestrator.Lives() as lives:
        yield lives


@pytest.fixture(scope="module")
def unbroken(lives, tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole"), **CHANGES)
    with FakeTrainer(run, TOKEN) as trainer:
        lives.finished(run)
    return run, trainer


def drawn(run):
    with contextlib.closing(sqlite3.connect(run.journal / "journal.sqlite")) as db:
        return db.execute("SELECT number, environment FROM groups ORDER BY id").fetchall()


def remembered(run):
    """By optimizer step, as it was taken last."""
    return {
        record["index"]: {k: v for k, v in record.items() if k.startswith(("baseline/", "solve_rate/"))}
        for record in lines(run.metrics)
    }


def same(run, trainer, unbroken):
    whole, other = unbroken
    assert drawn(run) == drawn(whole) and {name for _, name in drawn(run)} == {"short", "long"}
    assert remembered(run) == remembered(whole)
    assert len(remembered(run)[STEPS - 1]) == 4, "both environments have a baseline and a solve rate"
    assert sorted(map(int, trainer.trained)) == list(range(STEPS))
    for index in trainer.batches:
        if index >= trainer.start:
            for mine, theirs in zip(
                trainer.batches[index][0].micro_batches, other.batches[index][0].micro_batches, strict=True
            ):
                assert mine.advantages.tolist() == theirs.advantages.tolist()
                assert mine.tokens.tolist() == theirs.tokens.tolist()


def test_killed_under_a_trainer_that_lives_on(lives, tmp_path, unbroken):
    run = make_run(tmp_path, **CHANGES)
    with FakeTrainer(run, TOKEN) as trainer:
        for point, step in [("sealed", 4), ("applied", 6)]:
            lives.killed(run, point, step)
        lives.finished(run)
    same(run, trainer, unbroken)
    for index in range(STEPS):
        assert encode(trainer.batches[index][0]) == encode(unbroken[1].batches[index][0])


def test_killed_with_its_trainer(lives, tmp_path, unbroken):
    run = make_run(tmp_path, **CHANGES)
    with FakeTrainer(run, TOKEN):
        lives.killed(run, "sealed", 7)
    begin_attempt(run)
    with FakeTrainer(run, TOKEN) as second:
        assert second.start == 6
        lives.finished(run)
    same(run, second, unbroken)
