"""The journal: states move one way, cuts are exact, and damage is found."""

from __future__ import annotations

import numpy as np
import pytest

from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal, JournalError
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
    journal = Journal(tmp_path / "journal")
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

    restored = Journal(tmp_path / "journal", snapshot)
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


def test_finished_rollouts_without_their_arrays_are_planned_again(journal, tmp_path):
    snapshot = cut(journal, tmp_path)
    journal.close()
    arrays = tmp_path / "journal" / "rollouts"
    (arrays / "1-0.msgpack").unlink()
    whole = (arrays / "1-1.msgpack").read_bytes()
    (arrays / "1-1.msgpack").write_bytes(whole[: len(whole) // 2])
    (arrays / "2-0.msgpack").write_bytes(whole)
    restored = Journal(tmp_path / "journal", snapshot)
    assert restored.states() == {"durable": 2, "planned": 6, "dropped": 2}
    restored.close()


def test_without_a_snapshot_a_journal_begins_empty(journal, tmp_path):
    cut(journal, tmp_path)
    journal.close()
    fresh = Journal(tmp_path / "journal")
    assert fresh.states() == {} and fresh.position().index == 0
    assert not list((tmp_path / "journal" / "rollouts").iterdir())
    fresh.close()


def test_only_its_owner_reads_a_journal(journal, tmp_path):
    assert (tmp_path / "journal" / "journal.sqlite").stat().st_mode & 0o077 == 0
