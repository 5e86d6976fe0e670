"""Who is put out when: the doorkeeper by itself. Real connections: tests/security."""

from __future__ import annotations

import resource
import time
from collections.abc import Hashable

import pytest

from stackrl.runtime.transport import strangers
from stackrl.runtime.transport.strangers import Doorkeeper, FirstOfEach, many_files


class Door:
    """A doorkeeper and whom it has put out."""

    def __init__(self, **settings: float) -> None:
        self.keeper = Doorkeeper(**settings)
        self.out: list[Hashable] = []

    def arrive(self, *names: Hashable) -> None:
        for name in names:
            self.keeper.arrived(name, lambda name=name: self.out.append(name))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_stranger_is_put_out_when_its_time_is_over_and_it_was_looked_at_twice(clock: list[float]) -> None:
    door = Door(patience=10)
    door.arrive("early")
    clock[0] += 9
    door.keeper.sweep()
    door.arrive("late")
    clock[0] += 2
    door.keeper.sweep()
    assert door.out == []  # its request may be read in this very moment
    door.keeper.sweep()
    assert door.out == ["early"]


def test_who_has_shown_the_token_or_has_left_is_no_stranger(clock: list[float]) -> None:
    door = Door(most=0, patience=0)
    door.arrive("known", "left", "stays")
    door.keeper.known("known")
    door.keeper.left("left")
    door.keeper.known("never came")
    clock[0] += 5
    for _ in range(3):
        door.keeper.sweep()
    assert door.out == ["stays"]


def test_of_too_many_the_oldest_go_but_none_that_has_just_come() -> None:
    door = Door(most=3, patience=100)
    door.arrive(*range(5))
    door.keeper.sweep()
    assert door.out == []
    door.arrive(5)
    door.keeper.sweep()
    assert sorted(door.out) == [0, 1, 2]


def test_a_flood_is_cut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_AT_ONCE", 4)
    door = Door()
    door.arrive(*range(6))
    assert door.out == [0, 1]


def test_each_host_is_named_once_and_not_without_limit() -> None:
    first = FirstOfEach()
    named = [host for host in (f"10.0.{n // 256}.{n % 256}" for n in range(1000)) if first(host)]
    assert len(named) == 100 and not first("10.0.0.0")


def test_a_process_may_have_as_many_files_as_the_machine_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert many_files() == before[1] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
