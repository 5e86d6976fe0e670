"""Adaptive concurrency: grows while there is room, shrinks before the engine thrashes, finds its way back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stackrl.runtime.orchestrator.concurrency import FIRST, Concurrency, Look

CALM = Look(seconds=1.0, cache_use=0.1, running=8, queued=0, preempted=0, taken=8, lacking=True)
FLOODED = replace(CALM, cache_use=1.0, running=20, queued=12, preempted=3, taken=64)


PREFILL = 5
"""How many times faster a token is computed again than made."""


@dataclass
class Machine:
    """An engine as vLLM schedules it: first come, first served, and the last one loses its room."""

    room: int
    """Tokens in its cache."""
    lengths: tuple[int, int]
    """Least and most tokens that a request grows to."""
    speed: int = 20
    """Tokens of each request between two looks."""
    most: int = 256
    rng: Random = field(default_factory=lambda: Random(0))
    made: int = 0
    """Tokens, less those that could have been made while others were computed again."""

    def __post_init__(self):
        self.control = Concurrency(self.most)
        self.running: list[list[int]] = []
        """Tokens that each has, and will have."""
        self.queue: list[list[int]] = []

    @property
    def taken(self):
        return len(self.running) + len(self.queue)

    @property
    def used(self):
        return sum(has for has, _ in self.running)

    def second(self, demand: int | None = None) -> Look:
        """One look; ``demand``: rollouts that there are, by default more than enough."""
        wanted = self.control.limit if demand is None else min(demand, self.control.limit)
        preempted = 0
        for _ in range(self.speed):
            while self.taken < wanted:
                self.queue.append([10, self.rng.randint(*self.lengths)])
            while self.queue and self.used + self.queue[0][0] < self.room:
                self.running.append(self.queue.pop(0))
            for request in self.running:
                request[0] += 1
                self.made += 1
            self.running = [request for request in self.running if request[0] < request[1]]
            while self.used > self.room:
                self.queue.insert(0, self.running.pop())
                self.made -= self.queue[0][0] // PREFILL
                preempted += 1
        lacking = demand is None or demand > self.control.limit
        look = Look(
            1.0, self.used / self.room, len(self.running), len(self.queue), preempted, self.taken, lacking
        )
        self.control.after(look)
        return look


def fixed(machine: Machine, limit: int) -> Machine:
    machine.control.limit = machine.control.most = limit
    machine.control.after = lambda look: limit
    return machine


def test_grows_to_the_most_where_there_is_room():
    control = Concurrency(64)
    limits = [control.after(CALM) for _ in range(6)]
    assert control.limit == 64 and limits == sorted(limits) and limits[0] > FIRST


def test_does_not_grow_where_nobody_waits():
    control = Concurrency(64)
    assert control.after(replace(CALM, lacking=False)) == FIRST


def test_does_not_grow_beyond_what_fits():
    """A tenth of the cache each, so eight of them."""
    control = Concurrency(64)
    for _ in range(20):
        control.after(replace(CALM, cache_use=0.8, running=8))
    assert control.limit == 9


def test_shrinks_to_what_fits_before_anything_is_preempted():
    control = Concurrency(64)
    control.limit = 40
    assert control.after(replace(FLOODED, preempted=0, taken=40)) == 18


def test_shrinks_once_until_those_beyond_the_limit_have_ended():
    control = Concurrency(64)
    control.limit = 64
    once = control.after(FLOODED)
    assert control.after(FLOODED) == once < 20
    again = replace(FLOODED, running=once, queued=2, taken=once)
    assert control.after(again) < once


def test_never_less_than_one():
    control = Concurrency(64)
    for _ in range(30):
        control.after(replace(FLOODED, running=1, taken=control.limit))
    assert control.limit == 1
    assert max(control.after(replace(CALM, cache_use=0.3, running=1, taken=1)) for _ in range(300)) > 1


def test_a_queue_behind_a_pause_is_no_sign_of_thrashing():
    control = Concurrency(64)
    control.limit = 40
    behind = replace(FLOODED, preempted=0, running=30, taken=40)
    control.paused()
    assert [control.after(behind) for _ in range(3)] == [40] * 3
    control.after(replace(behind, queued=0, cache_use=0.5))
    assert control.after(behind) < 40, "the next queue is one for room"


@example(64, [Look(1.0, cache_use=1e-309, running=1, queued=0, preempted=1, taken=0, lacking=False)])
@given(
    st.integers(1, 300),
    st.lists(
        st.builds(
            Look,
            seconds=st.floats(0.1, 10),
            cache_use=st.floats(0, 1),
            running=st.integers(0, 400),
            queued=st.integers(0, 400),
            preempted=st.integers(0, 50),
            taken=st.integers(0, 400),
            lacking=st.booleans(),
        ),
        max_size=50,
    ),
)
def test_whatever_is_seen_it_stays_between_one_and_the_most(most, looks):
    control = Concurrency(most)
    for look in looks:
        before = control.limit
        after = control.after(look)
        assert 1 <= after <= most
        if look.preempted:
            assert after <= before
        if not look.lacking:
            assert after <= before


@pytest.mark.parametrize("lengths", [(20, 60), (400, 800), (50, 1500)])
def test_is_about_as_good_as_the_best_fixed_number(lengths):
    def made(machine):
        for _ in range(200):
            machine.second()
        return machine.made

    best = max(made(fixed(Machine(4000, lengths), limit)) for limit in (4, 16, 64))
    adaptive = Machine(4000, lengths, most=64)
    assert made(adaptive) >= 0.9 * best


def test_is_seldom_full_once_it_has_found_its_way():
    machine = Machine(room=4000, lengths=(200, 600))
    crowded = fixed(replace(machine, rng=Random(0)), 64)
    looks = [machine.second() for _ in range(400)]
    flooded = [crowded.second() for _ in range(400)]
    assert 4 * sum(look.preempted for look in looks[100:]) < sum(look.preempted for look in flooded[100:])
    assert sum(look.cache_use for look in looks[100:]) / 300 > 0.6


def test_rollouts_that_all_begin_at_once_find_the_limit_of_those_before():
    """As in each step of a run without staleness: young ones weigh little."""
    machine = Machine(room=4000, lengths=(200, 600))
    for _ in range(100):
        machine.second()
    found = machine.control.limit
    while machine.taken:
        machine.second(demand=0)
    machine.second()
    machine.second()
    assert machine.control.limit <= 1.3 * found
