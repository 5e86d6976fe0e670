"""The journal: states move one way, cuts are exact, and damage is found."""

from __future__ import annotations

import contextlib
import sqlite3
import time

import numpy as np
import pytest

from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal, JournalError, is_of
from stackrl.runtime.transport.messages import Sample, Span, Version


def plan(id, number=None, size=2):
    return Plan(id, "main", id if number is None else number, "reverse", admitted=0, size=size)


def rollout(group, number):
    sample = Sample(
        rollout=f"{group}-{number}",
        group=group,
        environment="reverse",
        tokens=np.arange(4, dtype="<i4"),
        loss_mask=np.array([0, 0, 1, 1], dtype="|u1"),
        logprobs=np.zeros(4, dtype="<f4"),
        spans=[Span(2, 4, Version(1, 0))],
    )
    return Rollout(
        group=group,
        number=number,
        environment="reverse",
        reward=0.5,
        metrics={"solved": 0.0},
        turns=1,
        sampled=2,
        prefix_breaks=0,
        samples=[sample],
    )


def place(index, step=0):
    return Place(1, index, step, "main", index, checkpoint=False, last_of_stage=False)


def finished_groups(journal, *groups):
    for group in groups:
        journal.plan(plan(group))
        for number in range(2):
            journal.finish(rollout(group, number))


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal", 1)
    yield journal
    journal.close()


def test_a_rollout_from_planned_to_durable(journal, tmp_path):
    arrays = tmp_path / "journal" / "rollouts"
    finished_groups(journal, 0)
    assert journal.states() == {"finished": 2} and len(list(arrays.iterdir())) == 2
    journal.seal(place(0), "rl", [0])
    assert journal.states() == {"batched": 2} and journal.position().index == 0
    journal.apply(0)
    assert journal.states() == {"applied": 2}
    assert journal.position().index == journal.position().step == 1
    assert journal.position().stage_steps == {"main": 1}
    assert len(list(arrays.iterdir())) == 2, "a rollback may still need them"
    journal.make_durable(0)
    assert journal.states() == {"durable": 2} and not list(arrays.iterdir())


def test_nothing_is_trained_twice_or_out_of_turn(journal):
    finished_groups(journal, 0)
    journal.seal(place(0), "rl", [0])
    for forbidden in (
        lambda: journal.seal(place(1), "rl", [0]),
        lambda: journal.finish(rollout(0, 0)),
        lambda: journal.drop_rollout(0, 0, "late"),
        lambda: journal.apply(1),
        lambda: journal.make_durable(0),
    ):
        with pytest.raises(JournalError):
            forbidden()
    assert journal.states() == {"batched": 2}, "a refused change leaves nothing behind"
    journal.apply(0)
    with pytest.raises(JournalError):
        journal.apply(0)


def test_supervised_steps_count_but_not_as_rl(journal):
    journal.seal(Place(1, 0, 0, "warmup", 0, False, True), "supervised", [])
    journal.apply(0)
    finished_groups(journal, 0)
    journal.seal(place(1), "rl", [0])
    journal.apply(1)
    position = journal.position()
    assert (position.index, position.step, position.stage_steps) == (2, 1, {"warmup": 1, "main": 1})


def test_a_prompt_is_planned_once(journal):
    journal.plan(plan(0, number=7))
    assert (journal.next_group(), journal.next_prompt("main"), journal.next_prompt("other")) == (1, 8, 0)
    with pytest.raises(Exception, match="UNIQUE"):
        journal.plan(plan(1, number=7))


def cut(journal, tmp_path):
    """A journal at a cut: group 0 applied, 1 finished, 2 half done, 3 planned, 4 dropped."""
    finished_groups(journal, 0, 1)
    for group in (2, 3, 4):
        journal.plan(plan(group))
    journal.finish(rollout(2, 0))
    journal.drop_group(4, "no_signal")
    journal.seal(place(0), "rl", [0])
    journal.apply(0)
    snapshot = tmp_path / "checkpoint" / "journal.sqlite"
    journal.snapshot(snapshot)
    return snapshot


def test_a_restored_journal_is_that_of_the_cut(journal, tmp_path):
    snapshot = cut(journal, tmp_path)
    journal.seal(place(1), "rl", [1])  # what follows is lost with the process
    journal.apply(1)
    journal.finish(rollout(2, 1))
    journal.plan(plan(5))
    journal.close()

    restored = Journal(tmp_path / "journal", 2, snapshot)
    assert restored.position().index == 1
    assert restored.states() == {"durable": 2, "finished": 3, "planned": 3, "dropped": 2}
    groups = {group.plan.id: group for group in restored.open_groups("main")}
    assert [len(groups[g].finished) for g in (1, 2, 3)] == [2, 1, 0]
    assert [list(groups[g].planned) for g in (1, 2, 3)] == [[], [1], [0, 1]]
    assert groups[1].finished[0].samples[0].tokens.tolist() == [0, 1, 2, 3]
    assert (restored.next_group(), restored.next_prompt("main")) == (5, 5)
    assert not (tmp_path / "journal" / "rollouts" / "2-1.msgpack").exists(), "it is to be done again"
    assert [p.name for p in snapshot.parent.iterdir()] == ["journal.sqlite"], "reading leaves nothing behind"
    restored.close()


def test_open_groups_of_a_stage_that_is_drawn_from_something_else_are_dropped(tmp_path):
    """Only those, only where it changed, and once: what is planned from then on is of the new recipe."""
    folder, old, new = tmp_path / "journal", {"main": "a", "other": "a"}, {"main": "b", "other": "a"}
    first = Journal(folder, 1, recipes=old)
    snapshot = cut(first, tmp_path)
    first.plan(Plan(5, "other", 0, "reverse", admitted=0, size=2))
    first.seal(place(1), "rl", [1])
    first.snapshot(snapshot)
    first.close()

    same = Journal(folder, 2, snapshot, old)
    assert same.changed == {} and len(same.open_groups("main")) == 3
    same.close()
    changed = Journal(folder, 3, snapshot, new)
    assert changed.changed == {"main": 6}, "the batch that was sealed at the cut is none any more"
    assert changed.open_groups("main") == [] and len(changed.open_groups("other")) == 1
    assert changed.states() == {"durable": 2, "dropped": 8, "planned": 2}
    assert [p.name for p in (folder / "rollouts").iterdir()] == []
    assert (changed.next_group(), changed.next_prompt("main")) == (6, 5)
    reasons = changed._db.execute("SELECT DISTINCT reason FROM rollouts WHERE group_id IN (1, 2, 3)")
    assert [reason.partition(":")[0] for (reason,) in reasons] == ["changed"]
    finished_groups(changed, 6)
    changed.snapshot(snapshot)
    changed.close()
    again = Journal(folder, 4, snapshot, new)
    assert again.changed == {} and len(again.open_groups("main")) == 1
    again.close()


def test_finished_rollouts_without_their_arrays_are_planned_again(journal, tmp_path):
    snapshot = cut(journal, tmp_path)
    journal.close()
    arrays = tmp_path / "journal" / "rollouts"
    (arrays / "1-0.msgpack").unlink()
    whole = (arrays / "1-1.msgpack").read_bytes()
    (arrays / "1-1.msgpack").write_bytes(whole[: len(whole) // 2])
    (arrays / "2-0.msgpack").write_bytes(whole)
    restored = Journal(tmp_path / "journal", 2, snapshot)
    assert restored.states() == {"durable": 2, "planned": 6, "dropped": 2}
    restored.close()


def test_without_a_snapshot_a_journal_begins_empty(journal, tmp_path):
    cut(journal, tmp_path)
    journal.close()
    fresh = Journal(tmp_path / "journal", 2)
    assert fresh.states() == {} and fresh.position().index == 0
    assert not list((tmp_path / "journal" / "rollouts").iterdir())
    fresh.close()


def test_only_its_owner_reads_a_journal(journal, tmp_path):
    assert (tmp_path / "journal" / "journal.sqlite").stat().st_mode & 0o077 == 0


def test_the_same_incarnation_goes_on_where_it_was_killed(journal, tmp_path):
    """Nothing is rolled back: not what came after the cut, not the batch that is sealed."""
    snapshot = cut(journal, tmp_path)
    journal.finish(rollout(2, 1))
    journal.seal(place(1), "rl", [2], tokens=8, record={"reward": 0.5})
    journal.close()

    assert is_of(tmp_path / "journal", 1) and not is_of(tmp_path / "journal", 2)
    resumed = Journal(tmp_path / "journal", 1, snapshot)
    assert resumed.states() == {"applied": 2, "batched": 2, "finished": 2, "planned": 2, "dropped": 2}
    sealed = resumed.sealed()
    assert (sealed.index, sealed.stage, sealed.kind, sealed.record) == (1, "main", "rl", {"reward": 0.5})
    assert [[r.id for r in group.rollouts] for group in sealed.groups] == [["2-0", "2-1"]]
    assert sealed.groups[0].rollouts[0].samples[0].tokens.tolist() == [0, 1, 2, 3]
    resumed.apply(1)
    assert resumed.sealed() is None and resumed.batch(1).record == {"reward": 0.5}
    resumed.close()


def test_a_sealed_batch_is_in_canonical_order(journal):
    for group in (1, 0, 2):
        journal.plan(plan(group))
        for number in (1, 0):
            journal.finish(rollout(group, number))
    journal.seal(place(0), "rl", [2, 0])
    assert [[r.id for r in group.rollouts] for group in journal.sealed().groups] == [
        ["0-0", "0-1"],
        ["2-0", "2-1"],
    ]


def test_a_batch_that_was_sealed_at_the_cut_is_undone(journal, tmp_path):
    """Its rollouts are whole, or are done again where their arrays are gone."""
    finished_groups(journal, 0, 1)
    journal.seal(place(0), "rl", [0, 1])
    snapshot = tmp_path / "checkpoint" / "journal.sqlite"
    journal.snapshot(snapshot)
    journal.close()
    (tmp_path / "journal" / "rollouts" / "1-1.msgpack").unlink()
    restored = Journal(tmp_path / "journal", 2, snapshot)
    assert restored.sealed() is None and restored.states() == {"finished": 3, "planned": 1}
    restored.seal(place(0), "rl", [0])
    restored.close()


def test_a_rollback_that_was_killed_is_begun_again(journal, tmp_path, monkeypatch):
    snapshot = cut(journal, tmp_path)
    journal.seal(place(1), "rl", [1])
    journal.close()
    for killed_at in ("_copy", "unseal", "os.replace"):
        with monkeypatch.context() as patch:

            def killed(*_, at=killed_at):
                raise KeyboardInterrupt(at)

            patch.setattr(f"stackrl.runtime.orchestrator.rollback.{killed_at}", killed)
            with pytest.raises(KeyboardInterrupt):
                Journal(tmp_path / "journal", 2, snapshot)
        assert not is_of(tmp_path / "journal", 2)
    restored = Journal(tmp_path / "journal", 2, snapshot)
    assert is_of(tmp_path / "journal", 2) and restored.position().index == 1 and restored.sealed() is None
    restored.close()


def test_a_damaged_journal_is_rolled_back(journal, tmp_path):
    snapshot = cut(journal, tmp_path)
    journal.close()
    file = tmp_path / "journal" / "journal.sqlite"
    file.write_bytes(b"damaged" * 1000)
    restored = Journal(tmp_path / "journal", 1, snapshot)
    assert restored.position().index == 1
    restored.close()


def test_a_snapshot_of_another_format_is_refused(journal, tmp_path):
    snapshot = cut(journal, tmp_path)
    with contextlib.closing(sqlite3.connect(snapshot)) as db:
        db.execute("PRAGMA user_version = 1")
    with pytest.raises(JournalError, match="has format 1, not 3: another version of stackrl made it"):
        Journal(tmp_path / "journal", 2, snapshot)


def test_times_and_tokens_are_kept_for_the_audit(journal, tmp_path):
    began = time.time()
    finished_groups(journal, 0)
    journal.seal(place(0), "rl", [0], tokens=11)
    journal.apply(0)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal" / "journal.sqlite")) as db:
        [(sealed, applied, tokens, incarnation)] = db.execute(
            "SELECT sealed_at, applied_at, packed_tokens, incarnation FROM batches"
        )
        [(finished,), _] = db.execute("SELECT finished_at FROM rollouts")
    assert began <= finished <= sealed <= applied <= time.time() and (tokens, incarnation) == (11, 1)


def test_every_commit_is_on_disk_before_the_call_returns(journal):
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (lambda journal: journal.plan(plan(7)), "plan group 7"),
        (lambda journal: journal.finish(rollout(0, 0)), "finish rollout 0-0"),
        (lambda journal: journal.seal(place(0), "rl", []), "seal batch 0"),
        (lambda journal: journal.drop_group(0, "stale"), "drop group 0"),
    ],
)
def test_a_full_or_read_only_disk_is_named_with_the_operation(journal, tmp_path, operation, what):
    journal.plan(plan(0))
    journal._db.execute("PRAGMA query_only = 1")
    with pytest.raises(JournalError) as caught:
        operation(journal)
    assert f"the journal {tmp_path}/journal/journal.sqlite could not {what}: " in str(caught.value)
    assert "readonly" in str(caught.value) and "df " in str(caught.value)


def test_a_full_disk_is_named_and_the_books_stay_whole(journal):
    journal._db.execute(f"PRAGMA max_page_count = {journal._one('PRAGMA page_count')}")
    with pytest.raises(JournalError, match=r"could not plan group \d+: .*full"):
        for group in range(5000):
            journal.plan(plan(group))
    assert journal.states()["planned"] == 2 * journal.next_group()
