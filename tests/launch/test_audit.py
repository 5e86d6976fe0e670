"""Audits of books that the real journal wrote, with one thing changed in each test."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stackrl.runtime import checkpoints
from stackrl.runtime.launch import audit as audits
from stackrl.runtime.launch.audit import Audit, audit
from stackrl.runtime.launch.books import copied
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.run import RunError, create_run
from stackrl.runtime.transport.messages import Sample, Span, Version
from stackrl.schemas.stack import Stack

GROUP, GROUPS_A_STEP = 3, 2
STACK = {
    "version": 1,
    "model": {"init": "random", "architecture": "qwen3"},
    "roles": {"trainer": {"processes": 2}, "inference": {"processes": 1}},
    "environments": [{"name": "reverse", "type": "reverse_text"}],
    "stages": [
        {"name": "warmup", "type": "supervised", "steps": 2},
        {"name": "main", "type": "rl", "steps": 4},
    ],
}
PLAN = {
    "processes": [
        {"role": role, "index": index, "node": 0, "gpus": []}
        for role, index in (("engine", 0), ("trainer", 0), ("trainer", 1), ("orchestrator", 0))
    ]
}


class SmallRun:
    """A run of two supervised and four RL steps with a checkpoint after each three, written by the real
    journal; the trainer's ledger and the metrics are written here."""

    def __init__(self, home: Path) -> None:
        source = home / "stack.yaml"
        source.write_text("name: small\n")
        self.run = create_run("small", source, "hash", Stack.model_validate(STACK), PLAN)
        self.checkpoints = self.run.path / "checkpoints"
        self.journal = Journal(self.run.journal, incarnation=1)
        self.ledger: list[list[str]] = [[], []]
        self.group = self.index = self.step = 0
        for stage_step in range(2):
            self.supervise(stage_step)
        for stage_step in range(4):
            self.reinforce(stage_step)
        self.plan_group()  # open at the end

    def plan_group(self) -> Plan:
        plan = Plan(self.group, "main", self.group, "reverse", admitted=self.step, size=GROUP)
        self.journal.plan(plan)
        self.group += 1
        return plan

    def supervise(self, stage_step: int) -> None:
        self.take("warmup", stage_step, "supervised", [])

    def reinforce(self, stage_step: int) -> None:
        plans = [self.plan_group() for _ in range(GROUPS_A_STEP)]
        for plan in plans:
            for number in range(GROUP):
                if (plan.id, number) == (0, 2):
                    self.journal.drop_rollout(0, 2, "failed: it took too long")
                else:
                    self.journal.finish(rollout(plan.id, number))
        self.take("main", stage_step, "rl", [plan.id for plan in plans])

    def take(self, stage: str, stage_step: int, kind: str, groups: list[int]) -> None:
        place = Place(1, self.index, self.step, stage, stage_step, False, False)
        self.journal.seal(place, kind, groups, tokens=100, record={})
        names = [f"{g}-{n}" for g in groups for n in range(GROUP) if (g, n) != (0, 2)]
        for rank in range(2):
            documents = [[name, f"prompt of {name.partition('-')[0]}"] for name in names[rank::2]]
            line = {"index": self.index, "step": self.step, "stage": stage, "incarnation": 1}
            self.ledger[rank].append(json.dumps({**line, "documents": documents}))
        time.sleep(0.01)
        self.journal.apply(self.index)
        record = {
            "time": time.time(),
            "kind": kind,
            "index": self.index,
            "step": self.step,
            "stage": stage,
            "stage_step": stage_step,
            "seconds_step": 0.5,
            "tokens_per_second": 600.0,
        }
        record |= {"rollouts": len(names)} if kind == "rl" else {}
        with self.run.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.index += 1
        self.step += kind == "rl"
        if self.index % 3 == 0:
            self.save()

    def save(self) -> None:
        folder = checkpoints.folder(self.checkpoints, self.index)
        (folder / "trainer").mkdir(parents=True)
        for rank, lines in enumerate(self.ledger):
            (folder / "trainer" / f"ledger-{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        self.journal.snapshot(folder / "orchestrator" / "journal.sqlite")
        checkpoints.write_manifest(folder, {})
        self.journal.make_durable(self.index - 1)

    def change(self, sql: str, *values: object) -> None:
        with contextlib.closing(sqlite3.connect(self.run.journal / "journal.sqlite")) as db, db:
            assert db.execute(sql, values).rowcount, "the test changes nothing"

    def change_ledger(self, old: str, new: str, rank: int = 0, step: int = 6) -> None:
        """In the ledger of one rank in the checkpoint of ``step``, which is then sealed again."""
        folder = checkpoints.folder(self.checkpoints, step)
        file = folder / "trainer" / f"ledger-{rank}.jsonl"
        text = file.read_text()
        assert text.count(old) == 1, "the test changes nothing, or too much"
        file.write_text(text.replace(old, new))
        checkpoints.write_manifest(folder, {})


def rollout(group: int, number: int) -> Rollout:
    sample = Sample(
        rollout=f"{group}-{number}",
        group=group,
        environment="reverse",
        tokens=np.arange(4, dtype="<i4"),
        loss_mask=np.array([0, 0, 1, 1], "|u1"),
        logprobs=np.zeros(4, "<f4"),
        spans=[Span(2, 4, Version(1, 0))],
    )
    return Rollout(
        group=group,
        number=number,
        environment="reverse",
        reward=0.5,
        metrics={},
        turns=1,
        sampled=50,
        prefix_breaks=0,
        samples=[sample],
    )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    run = SmallRun(tmp_path)
    yield run
    run.journal.close()


def kinds(found: Audit) -> dict[str, list[str]]:
    """The findings by kind, empty kinds left out."""
    names = ("lost", "trained_twice", "mixed_groups", "wrong_steps")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def test_good_books_are_clean_and_add_up(small: SmallRun) -> None:
    found = audit(small.run)
    assert found.clean and kinds(found) == {} and found.notes == []
    assert vars(found.rollouts) == {
        "planned": 9 * GROUP,
        "finished": 8 * GROUP - 1,
        "trained": 8 * GROUP - 1,
        "dropped": {"failed": 1},
        "open": GROUP,
        "open_reason": "left at the end: no batch needed them any more",
    }
    assert vars(found.steps) == {"all": 6, "rl": 4, "stages": {"warmup": 2, "main": 4}}
    assert (found.journal, found.ledger) == ("the live journal", "step-000006")
    assert [(known.name, known.problem) for known in found.checkpoints] == [
        ("step-000003", ""),
        ("step-000006", ""),
    ]
    text = str(found)
    assert text.splitlines()[0].endswith("lost 0, trained twice 0, mixed groups 0")
    assert "planned 27 = trained 23 + dropped 1 + open 3" in text
    assert json.loads(json.dumps(found.as_json()))["clean"] is True


def test_speed_is_recomputed_from_the_journal(small: SmallRun) -> None:
    """Three pairs of RL steps and one of supervised ones; 3 devices."""
    small.change("UPDATE batches SET applied_at = 1000.0 + id * 2")
    small.change("UPDATE rollouts SET finished_at = 999.5 + batch * 2 WHERE batch IS NOT NULL")
    found = audit(small.run).speed
    generated = 3 * GROUPS_A_STEP * GROUP * 50
    assert (found.devices, found.tokens, found.seconds) == (3, generated + 4 * 100, 8.0)
    assert found.recomputed == pytest.approx((generated + 400) / 8 / 3)
    assert found.reported == pytest.approx(200.0)
    event = {"time": 1009.0, "event": "evaluated", "stage": "main", "when": "held-out"}
    small.run.events.write_text(json.dumps(event) + "\n")
    assert audit(small.run).speed.seconds == 6.0


def test_the_run_is_left_as_it_was(small: SmallRun) -> None:
    def content() -> dict[str, tuple[bytes, int]]:
        files = (path for path in small.run.path.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = content()
    assert audit(small.run).clean
    assert content() == before


CHANGES = {
    "a prompt is skipped": (
        "UPDATE groups SET number = 20 WHERE id = 5",
        "lost",
        "prompt 5 of stage main is not in the journal",
    ),
    "a rollout is missing": (
        "DELETE FROM rollouts WHERE group_id = 8 AND number = 1",
        "lost",
        "rollout 8-1 is not in the journal",
    ),
    "a group is missing": (
        "DELETE FROM groups WHERE id = 8",
        "lost",
        "group 8 has rollouts in the journal and is not there itself",
    ),
    "trained and not in the books": (
        "UPDATE rollouts SET state = 'finished', batch = NULL WHERE group_id = 4 AND number = 0",
        "lost",
        "rollout 4-0 was trained in step 4, the journal does not know of it",
    ),
    "less far than its step": (
        "UPDATE rollouts SET state = 'batched' WHERE group_id = 4 AND number = 0",
        "lost",
        "rollout 4-0 is batched, its step 4 is durable",
    ),
    "a group in two batches": (
        "UPDATE rollouts SET batch = 5 WHERE group_id = 4 AND number = 0",
        "mixed_groups",
        "group 4 was trained in several steps: 4, 5",
    ),
    "steps in another order": (
        "UPDATE batches SET step = 3 WHERE id = 4",
        "wrong_steps",
        "step 4 is RL step 3 and step 2 of stage main in the journal; 2 and 2 come next",
    ),
    "a step is missing": (
        "UPDATE batches SET id = 9 WHERE id = 5",
        "wrong_steps",
        "step 5 is not in the journal, which goes on with step 9",
    ),
    "a step was skipped": (
        "UPDATE batches SET state = 'batched' WHERE id = 1",
        "wrong_steps",
        "step 1 was never applied, though others follow it",
    ),
    "of another stage": (
        "UPDATE groups SET stage = 'other', number = 0 WHERE id = 4",
        "wrong_steps",
        "rollout 4-1 was planned for stage other and trained in step 4 of stage main",
    ),
    "of no group": (
        "DELETE FROM groups WHERE id = 4",
        "wrong_steps",
        "rollout 4-1 was trained in step 4, its group is not in the journal",
    ),
    "taken in another life": (
        "UPDATE batches SET incarnation = 2 WHERE id = 5",
        "wrong_steps",
        "step 5 was taken in incarnation 1 by the trainer's ledger, in 2 by the journal",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_journal_is_found_out(small: SmallRun, what: str) -> None:
    sql, kind, sentence = CHANGES[what]
    small.change(sql)
    found = audit(small.run)
    assert not found.clean and sentence in kinds(found)[kind]
    assert sentence in str(found)


def test_a_rollout_that_the_trainer_never_saw_is_lost(small: SmallRun) -> None:
    small.change_ledger('["4-0","prompt of 4"]'.replace(",", ", "), '["44-0", "prompt of 44"]')
    found = kinds(audit(small.run))
    assert "rollout 4-0 counts as trained in step 4, the trainer's ledger does not have it" in found["lost"]
    assert "rollout 44-0 was trained in step 4, the journal does not know of it" in found["lost"]


def test_a_rollout_that_the_trainer_trained_in_another_stage_is_found(small: SmallRun) -> None:
    for rank in range(2):
        small.change_ledger(
            '"index": 4, "step": 2, "stage": "main"', '"index": 4, "step": 2, "stage": "no"', rank
        )
    found = audit(small.run).wrong_steps
    assert "rollout 4-0 was planned for stage main and trained in step 4 of stage no" in found


def test_a_step_whose_speed_is_not_known_is_left_out_of_it(small: SmallRun) -> None:
    """The orchestrator was started again in the middle of it."""
    records = [json.loads(line) for line in small.run.metrics.read_text().splitlines()]
    for name in ("seconds_step", "tokens_per_second"):
        del records[3][name]
    small.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = audit(small.run)
    assert found.clean and found.speed.reported == pytest.approx(200.0)


def test_a_rollout_trained_twice_is_found_in_another_step_and_in_the_same(small: SmallRun) -> None:
    small.change_ledger('["6-0", "prompt of 6"]', '["6-0", "prompt of 6"], ["4-0", "prompt of 4"]')
    small.change_ledger('["7-0", "prompt of 7"]', '["7-0", "prompt of 7"], ["6-0", "prompt of 6"]', rank=1)
    assert audit(small.run).trained_twice == [
        "rollout 4-0 was trained 2 times: in steps 4, 5",
        "rollout 6-0 was trained 2 times: in steps 5, 5",
    ]


def test_a_group_of_two_prompts_is_mixed_but_later_sequences_may_differ(small: SmallRun) -> None:
    small.change_ledger('["4-0", "prompt of 4"]', '["4-0", "prompt of 4"], ["4-0/1", "longer"]')
    assert audit(small.run).clean
    small.change_ledger('["4-0", "prompt of 4"]', '["4-0", "another prompt"]')
    assert audit(small.run).mixed_groups == ["group 4 was trained on 2 different prompts"]


def test_a_ledger_without_a_step_or_without_lines_is_wrong(small: SmallRun) -> None:
    small.change_ledger('{"index": 3,', '{"index": 7,')
    small.change_ledger('{"index": 3,', '{"index": 7,', rank=1)
    found = kinds(audit(small.run))["wrong_steps"]
    assert "step 3 is not in the trainer's ledger of step-000006" in found
    assert "step 7 is in the trainer's ledger of step-000006, beyond its cut" in found
    for rank in range(2):
        (small.checkpoints / "step-000006" / "trainer" / f"ledger-{rank}.jsonl").unlink()
    checkpoints.write_manifest(small.checkpoints / "step-000006", {})
    assert len(audit(small.run).wrong_steps) == 6


def test_metrics_that_say_something_else_are_wrong(small: SmallRun) -> None:
    records = [json.loads(line) for line in small.run.metrics.read_text().splitlines()]
    records[4]["rollouts"] = 5
    records[3]["step"] = 7
    del records[5]
    small.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert audit(small.run).wrong_steps == [
        "step 3 is (7, 'main', 1) in metrics.jsonl: RL step, stage, its step",
        "step 4 trained 5 rollouts by metrics.jsonl, 6 by the journal",
        "step 5 is not in metrics.jsonl",
    ]


def test_steps_that_were_rolled_back_are_no_longer_told(small: SmallRun) -> None:
    """The journal stands at step 3 again; the metrics of what came after it count until the run says so."""
    small.journal.close()
    cut = small.checkpoints / "step-000003"
    small.journal = Journal(small.run.journal, 2, cut / "orchestrator" / "journal.sqlite")
    (small.checkpoints / "step-000006" / "manifest.json").unlink()
    found = audit(small.run)
    assert found.steps.all == 3 and found.notes == []
    assert kinds(found) == {
        "wrong_steps": [f"step {step} is in metrics.jsonl and not in the journal" for step in (3, 4, 5)]
    }
    with small.run.kept():
        assert audit(small.run).clean, "a run that goes on may be further than the journal that was read"
    event = {"time": time.time(), "event": "resumed", "from": str(cut), "index": 3, "damaged": []}
    small.run.events.write_text(json.dumps(event) + "\n")
    assert audit(small.run).clean


def test_a_snapshot_may_be_behind_the_metrics(small: SmallRun) -> None:
    small.journal.close()
    for file in small.run.journal.glob("journal.sqlite*"):
        file.unlink()
    (small.checkpoints / "step-000006" / "manifest.json").unlink()
    found = audit(small.run)
    assert found.clean and found.notes == [
        "metrics.jsonl has 6 steps, the snapshot of step-000003 3: those behind them are taken again when "
        "the run goes on"
    ]


def test_the_contents_of_checkpoints_are_read_only_where_they_are_asked_for(small: SmallRun) -> None:
    file = small.checkpoints / "step-000003" / "trainer" / "ledger-0.jsonl"
    file.write_bytes(b"?" * file.stat().st_size)
    good, damaged = audit(small.run, contents=False), audit(small.run)
    assert [known.problem for known in good.checkpoints] == ["", ""]
    assert good.notes == [
        f"of checkpoints only names and sizes were compared: `stackrl audit {small.run.id}` reads all of them"
    ]
    assert f"{file} is damaged" in damaged.checkpoints[0].problem and damaged.notes == []
    file.write_bytes(b"?")
    assert f"{file} is damaged" in audit(small.run, contents=False).checkpoints[0].problem


def test_without_the_journal_the_newest_whole_snapshot_speaks(small: SmallRun) -> None:
    small.journal.close()
    for file in small.run.journal.glob("journal.sqlite*"):
        file.unlink()
    found = audit(small.run)
    assert found.clean and found.journal == "the snapshot of step-000006"
    (small.checkpoints / "step-000006" / "trainer" / "ledger-0.jsonl").write_text("[]\n")
    (small.checkpoints / "step-000006").rename(small.checkpoints / "step-000006.damaged")
    found = audit(small.run)
    assert found.clean and found.journal == "the snapshot of step-000003"
    [good, damaged] = found.checkpoints
    assert good.problem == "" and "ledger-0.jsonl is damaged" in damaged.problem
    (good.path / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"no books to audit.*no whole checkpoint"):
        audit(small.run)


def test_a_damaged_journal_does_not_hide_behind_an_exception(small: SmallRun) -> None:
    small.journal.close()
    (small.run.journal / "journal.sqlite-wal").unlink(missing_ok=True)
    (small.run.journal / "journal.sqlite").write_bytes(b"not a database" * 100)
    assert audit(small.run).journal == "the snapshot of step-000006"


def test_the_verb_says_it_by_its_exit_code(small: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert audits.show("latest", "json") == 0
    assert json.loads(capsys.readouterr().out)["rollouts"]["trained"] == 23
    small.change("DELETE FROM rollouts WHERE group_id = 8 AND number = 1")
    assert audits.show("latest", "text") == 1
    assert "lost 1, trained twice 0, mixed groups 0" in capsys.readouterr().out


WRITER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1])
db.execute("PRAGMA journal_mode = WAL")
db.execute("PRAGMA wal_autocheckpoint = 20")
for number in range(10_000_000):
    with db:
        for place in range(8):
            values = (number, bytes(3000), place)
            db.execute("UPDATE pages SET number = ?, filling = ? WHERE place = ?", values)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_a_journal_that_is_being_written_is_copied_as_of_one_moment(tmp_path: Path) -> None:
    """A writer puts the same number onto pages far apart, and moves its log into the database every 20
    pages: a copy of two moments would show two numbers."""
    database = tmp_path / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as db, db:
        db.execute("CREATE TABLE pages (place INTEGER PRIMARY KEY, number INTEGER, filling BLOB)")
        db.executemany("INSERT INTO pages VALUES (?, -1, ?)", [(place, bytes(3000)) for place in range(8)])
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(database)])
    seen, copies, deadline = set(), 0, time.monotonic() + 60
    try:
        while (copies < 40 or len(seen) <= 10) and time.monotonic() < deadline:
            copies += 1
            with copied(database) as copy, contextlib.closing(sqlite3.connect(copy)) as db:
                numbers = {number for (number,) in db.execute("SELECT number FROM pages")}
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert len(numbers) == 1
            seen |= numbers
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) > 10
