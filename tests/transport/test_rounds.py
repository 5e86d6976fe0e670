"""Receivers that come one by one take a version together, and wait for none that does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.rounds import Rounds

LONG = 600.0
"""Seconds that nobody waits in a test that passes."""
WITHIN = 20.0
"""Seconds for whatever is to happen."""


class Meetings:
    """Receivers as threads; ``begun``: the members of each round that took place."""

    def __init__(self, gather: float) -> None:
        self.rounds: Rounds[frozenset[str]] = Rounds(gather)
        self.begun: list[tuple[int, dict[str, str]]] = []
        self._threads = ThreadPoolExecutor(16)

    def come(self, step: int, *members: str, holds: str = "") -> list[Future]:
        return [self._threads.submit(self.join, step, member, holds) for member in members]

    def join(self, step: int, member: str, holds: str = "") -> frozenset[str] | None:
        def begin(members: Mapping[str, str]) -> frozenset[str]:
            self.begun.append((step, dict(members)))
            return frozenset(members)

        return self.rounds.join(Version(1, step), member, holds, begin)


def results(futures: list[Future]) -> list[frozenset[str] | None]:
    return [future.result(WITHIN) for future in futures]


def test_who_comes_for_the_first_time_goes_alone() -> None:
    meetings = Meetings(LONG)
    assert results(meetings.come(0, "a", "b", "c")) == [None] * 3
    assert meetings.begun == []


def test_who_came_before_is_waited_for() -> None:
    meetings = Meetings(LONG)
    results(meetings.come(0, "a", "b", "c"))
    first = meetings.come(1, "a", "b", holds="g")
    time.sleep(0.1)
    assert not any(future.done() for future in first)
    assert results(first + meetings.come(1, "c", holds="h")) == [frozenset("abc")] * 3
    assert meetings.begun == [(1, {"a": "g", "b": "g", "c": "h"})]


def test_one_that_does_not_come_is_not_waited_for_twice() -> None:
    meetings = Meetings(gather=0.5)
    results(meetings.come(0, "a", "b", "c"))
    began = time.monotonic()
    assert results(meetings.come(1, "a", "b")) == [frozenset("ab")] * 2
    assert time.monotonic() - began >= 0.45
    meetings.rounds._gather = LONG
    assert results(meetings.come(2, "a", "b")) == [frozenset("ab")] * 2
    assert meetings.join(2, "c") is None  # too late, and back again
    waiting = meetings.come(3, "a", "b")
    time.sleep(0.1)
    assert not any(future.done() for future in waiting)
    assert results(waiting + meetings.come(3, "c")) == [frozenset("abc")] * 3


def test_whoever_joins_in_the_meantime_does_not_disturb_those_who_wait() -> None:
    meetings = Meetings(LONG)
    results(meetings.come(0, "a", "b"))
    waiting = meetings.come(1, "a")
    assert meetings.join(1, "new") is None
    assert results(waiting + meetings.come(1, "b")) == [frozenset("ab")] * 2
    assert results(meetings.come(2, "a", "b", "new")) == [frozenset(["a", "b", "new"])] * 3


def test_one_that_has_come_for_a_newer_version_is_not_expected_for_an_older_one() -> None:
    meetings = Meetings(LONG)
    results(meetings.come(0, "a", "b"))
    older = meetings.come(1, "a")
    time.sleep(0.1)
    newer = meetings.come(2, "b")
    assert results(older) == [frozenset("a")]
    assert not newer[0].done()
    assert results(newer + meetings.come(2, "a")) == [frozenset("ab")] * 2


def test_a_second_try_for_the_same_version_goes_alone() -> None:
    meetings = Meetings(LONG)
    results(meetings.come(0, "a"))
    assert meetings.join(1, "a") == frozenset("a")
    assert meetings.join(1, "a") is None


def test_when_it_cannot_begin_nobody_waits() -> None:
    rounds: Rounds[None] = Rounds(LONG)

    def begin(members: Mapping[str, str]) -> None:
        raise OSError("no more threads")

    for member in "ab":
        rounds.join(Version(1, 0), member, "", begin)
    outcomes: list[object] = []

    def come(member: str) -> None:
        try:
            outcomes.append(rounds.join(Version(1, 1), member, "", begin))
        except OSError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=come, args=(member,)) for member in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert sorted(map(str, outcomes)) == ["None", "no more threads"]


@pytest.mark.parametrize("engines", [1, 2, 12])
def test_all_versions_of_a_run_go_to_all(engines: int) -> None:
    meetings = Meetings(LONG)
    members = [str(number) for number in range(engines)]
    for step in range(12):
        expected = frozenset(members) if step else None
        assert results(meetings.come(step, *members)) == [expected] * engines
    assert len(meetings.rounds._rounds) <= 4
