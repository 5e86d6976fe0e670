"""Admission: whatever the order in which groups finish, nothing is too old, dropped or stuck."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackrl.runtime.orchestrator.admission import Admission


def admission(batch_size=4, max_staleness=1, step=10, batches_left=3):
    return Admission(batch_size=batch_size, max_staleness=max_staleness, step=step, batches_left=batches_left)


def admit_all(a, engines, first=0, size=1):
    group = first
    while a.may_admit(engines):
        a.admit(group, size)
        group += 1
    return group


def test_at_most_so_many_are_admitted_and_not_trained():
    a = admission()
    assert admit_all(a, 10) == 8
    a.seal(a.choose(range(4)))
    assert not a.may_admit(10), "the sealed batch is not trained yet"
    a.applied()
    assert not a.may_admit(10), "the engines are a step behind"
    assert admit_all(a, 11, first=8) == 12


def test_zero_staleness_is_a_barrier():
    a = admission(max_staleness=0)
    assert admit_all(a, 10) == 4
    assert a.choose(range(3)) is None
    a.seal(a.choose(range(4)))
    assert not a.may_admit(10) and not a.may_admit(11)
    a.applied()
    assert not a.may_admit(10) and a.may_admit(11)


def test_never_more_than_the_stage_needs():
    a = admission(max_staleness=5, batches_left=2)
    assert admit_all(a, 10) == 8


def test_a_dropped_group_makes_room():
    a = admission()
    admit_all(a, 10)
    a.drop(3)
    assert a.may_admit(10)


def test_a_group_that_is_due_is_waited_for():
    a = admission(max_staleness=1)
    admit_all(a, 10)
    a.seal(a.choose([4, 5, 6, 7]))
    a.applied()
    admit_all(a, 11, first=8)
    assert a.choose([8, 9, 10, 11, 0, 1, 2]) is None, "group 3 is due by this step"
    assert a.choose([8, 9, 10, 11, 0, 1, 2, 3]) == [0, 1, 2, 3]


def test_groups_of_several_sizes_make_a_batch_that_has_its_size_at_least():
    a = admission(batch_size=16, max_staleness=1)
    for group, size in enumerate((6, 4, 8, 6, 4, 8)):
        assert a.may_admit(10)
        a.admit(group, size)
    assert not a.may_admit(10), "36 rollouts wait, and 32 is where admission ends"
    assert a.choose([0, 1]) is None, "10 rollouts are no batch"
    assert a.choose([0, 1, 3]) == [0, 1, 3], "those that are finished, in their order"
    a.seal(a.choose([0, 1, 2, 3, 4, 5]))
    assert (a.training, set(a.waiting)) == (18, {3, 4, 5}), "what is finished beyond a batch waits"


def test_a_batch_is_not_held_up_by_what_cannot_be_trained_in_time_anyway():
    """As after a restart with a smaller batch: dropping what is too old is left to others."""
    a = admission(batch_size=2, max_staleness=0)
    for group in range(6):
        a.take_up(group, 1, admitted=10)
    assert a.choose([1, 2, 3, 4, 5]) is None
    assert a.choose(range(6)) == [0, 1]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    batch_size=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    max_staleness=st.integers(0, 4),
    batches=st.integers(1, 8),
    choices=st.randoms(use_true_random=False),
)
def test_any_course_of_events_ends_with_fresh_batches(batch_size, sizes, max_staleness, batches, choices):
    """Groups of any size finish or fail in any order, engines lag behind: each batch is fresh and holds what
    it should, nothing is generated in vain, and the stage ends."""
    sizes = [min(size, batch_size) for size in sizes]
    a = admission(batch_size, max_staleness, step=0, batches_left=batches)
    engines, next_group, sealed = 0, 0, 0
    admitted: dict[int, tuple[int, int]] = {}
    running: set[int] = set()
    finished: set[int] = set()
    fails_left = restarts_left = 5
    for _ in range(10_000):
        if sealed == batches and not a.training:
            break
        events = []
        if a.may_admit(engines):
            events.append("admit")
        if running:
            events.append("finish")
            events.extend(["fail"] * bool(fails_left))
        if a.choose(finished):
            events.append("seal")
        if a.training:
            events.append("apply")
        if engines < a.step:
            events.append("update")
        if not a.training and restarts_left:
            events.append("restart")
        assert [event for event in events if event != "restart"], "nothing can happen any more"
        event = choices.choice(events)
        if event == "admit":
            size = choices.choice(sizes)
            a.admit(next_group, size)
            admitted[next_group] = (size, engines)
            running.add(next_group)
            next_group += 1
        elif event in ("finish", "fail"):
            group = choices.choice(sorted(running))
            running.remove(group)
            if event == "finish":
                finished.add(group)
            else:
                fails_left -= 1
                a.drop(group)
        elif event == "seal":
            batch = a.choose(finished)
            rollouts = sum(admitted[group][0] for group in batch)
            assert batch_size <= rollouts < batch_size + max(sizes)
            assert all(a.step - admitted[group][1] <= max_staleness for group in batch)
            a.seal(batch)
            finished -= set(batch)
            sealed += 1
        elif event == "apply":
            a.applied()
        elif event == "restart":
            before, restarts_left = a, restarts_left - 1
            a = admission(batch_size, max_staleness, step=before.step, batches_left=batches - sealed)
            for group in running | finished:
                a.take_up(group, *admitted[group])
            assert a == before, "an orchestrator that starts again counts what it finds"
        else:
            engines = a.step
        assert a.rollouts_waiting + a.training < (max_staleness + 1) * batch_size + max(sizes)
    else:
        pytest.fail("the stage did not end")
    assert not a.waiting, "nothing is generated in vain"
