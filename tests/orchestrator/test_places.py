"""Places: never more are taken than the limit allows, none is lost, and who came first is first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest

from stackrl.runtime.orchestrator.places import Places


class Visitors:
    """Tasks that each want a place, and keep it until they are told to leave."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.inside: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task] = {}
        self.order: list[int] = []

    def come(self) -> int:
        number = len(self.tasks)
        self.tasks[number] = asyncio.create_task(self._visit(number))
        return number

    async def _visit(self, number: int) -> None:
        async with self.places:
            self.order.append(number)
            self.inside[number] = asyncio.Event()
            try:
                await self.inside[number].wait()
            finally:
                del self.inside[number]

    async def give_up(self, number: int) -> None:
        self.tasks[number].cancel()
        with suppress(asyncio.CancelledError):
            await self.tasks[number]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_came_first_gets_the_next_place():
    visitors = Visitors(Places(2))
    for _ in range(5):
        visitors.come()
    await settled()
    assert visitors.order == [0, 1] and visitors.places.waiting == 3
    visitors.inside[1].set()
    await settled()
    assert visitors.order == [0, 1, 2]


async def test_a_raised_limit_lets_those_in_who_wait():
    visitors = Visitors(Places(1))
    for _ in range(5):
        visitors.come()
    await settled()
    visitors.places.limit = 3
    await settled()
    assert visitors.order == [0, 1, 2]


async def test_under_a_lowered_limit_nobody_leaves_and_nobody_enters():
    visitors = Visitors(Places(4))
    for _ in range(6):
        visitors.come()
    await settled()
    visitors.places.limit = 2
    for number in (0, 1):
        visitors.inside[number].set()
    await settled()
    assert set(visitors.inside) == {2, 3} and visitors.places.waiting == 2
    visitors.inside[2].set()
    await settled()
    assert set(visitors.inside) == {3, 4}


async def test_one_that_gives_up_keeps_no_place():
    visitors = Visitors(Places(1))
    for _ in range(3):
        visitors.come()
    await settled()
    await visitors.give_up(1)
    assert visitors.places.waiting == 1
    visitors.inside[0].set()
    await settled()
    assert visitors.order == [0, 2]


async def test_a_place_that_came_too_late_goes_to_the_next():
    """It is given in the same turn of the loop in which its visitor is cancelled."""
    visitors = Visitors(Places(1))
    for _ in range(3):
        visitors.come()
    await settled()
    visitors.places.limit = 2
    await visitors.give_up(1)
    await settled()
    assert set(visitors.inside) == {0, 2} and visitors.places.taken == 2


async def test_nobody_waits_behind_one_that_has_given_up():
    """Who comes in the same turn of the loop, before the other has noticed, finds the free place."""
    visitors = Visitors(Places(1))
    visitors.come()
    visitors.come()
    await settled()
    visitors.come()
    visitors.tasks[1].cancel()
    visitors.places.limit = 2
    await settled()
    assert set(visitors.inside) == {0, 2}


async def test_it_is_told_once_that_somebody_had_to_wait():
    visitors = Visitors(Places(1))
    visitors.come()
    await settled()
    assert not visitors.places.lacked()
    visitors.come()
    await settled()
    assert visitors.places.lacked() and visitors.places.lacked(), "it still waits"
    visitors.inside[0].set()
    await settled()
    assert visitors.places.lacked(), "it waited since"
    assert not visitors.places.lacked()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_no_place_is_lost_and_none_too_many_is_given(seed):
    rng, visitors = Random(seed), Visitors(Places(3))
    for _ in range(200):
        before = len(visitors.inside)
        match rng.randrange(4):
            case 0:
                visitors.come()
            case 1 if visitors.inside:
                visitors.inside[rng.choice(list(visitors.inside))].set()
            case 2 if waiting := [n for n, task in visitors.tasks.items() if not task.done()]:
                visitors.tasks[rng.choice(waiting)].cancel()
            case 3:
                visitors.places.limit = rng.randrange(1, 8)
        if rng.random() < 0.5:
            await settled()
            assert visitors.places.taken == len(visitors.inside) <= max(before, visitors.places.limit)
            assert visitors.places.taken >= visitors.places.limit or not visitors.places.waiting
    visitors.places.limit = 1
    await settled()
    while visitors.inside:
        visitors.inside[min(visitors.inside)].set()
        await settled()
    assert visitors.places.taken == visitors.places.waiting == 0
    await asyncio.gather(*visitors.tasks.values(), return_exceptions=True)
