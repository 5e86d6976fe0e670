"""An engine's load: its own metrics set its places, and go into the run's metrics."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine
from served_engines import serving
from small_runs import reversed_well

from stackrl.runtime.inference.client import EngineError
from stackrl.runtime.orchestrator.engine_load import EngineLoad, Loads
from stackrl.runtime.transport.messages import Version


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_load.LOOK_EVERY", 0.01)


@pytest.fixture
def engine():
    return FakeEngine(reversed_well, token_delay=0.01)


async def flooded(load, engine):
    """Rollouts that ask without end, each in its place."""

    async def ask(number):
        async with load.places:
            engine.running += 1
            await asyncio.sleep(0.1)
            engine.running -= 1
        asking.add(asyncio.create_task(ask(number)))

    asking = {asyncio.create_task(ask(number)) for number in range(64)}
    return asking


async def watched(load, condition, engine):
    watching = asyncio.create_task(load.watch())
    asking = await flooded(load, engine)
    try:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (a number is waited for)
                await asyncio.sleep(0.01)
    finally:
        for task in [watching, *asking]:
            task.cancel()


async def test_places_grow_while_the_engine_has_room(engine):
    load = EngineLoad(engine, 48, True, Loads())
    load.serves(True)
    await watched(load, lambda: load.places.limit == 48, engine)


async def test_places_stay_within_what_the_engine_holds(engine):
    engine.room = 20
    loads = Loads()
    load = EngineLoad(engine, 64, True, loads)
    load.serves(True)
    seen = []
    await watched(load, lambda: seen.append(load.places.limit) or len(seen) > 200, engine)
    assert max(seen) <= 30 and min(seen[100:]) >= 8
    record = loads.lap()
    assert 0 < record["engines/cache_use"] <= 1 and record["engines/places"] <= 30
    assert not loads.lap(), "nobody has looked since"


async def test_a_fixed_number_stays_and_is_told(engine):
    engine.room, loads = 4, Loads()
    load = EngineLoad(engine, 16, False, loads)
    load.serves(True)
    seen = []
    await watched(load, lambda: seen.append(load.places.limit) or len(seen) > 30, engine)
    record = loads.lap()
    assert set(seen) == {16} and record["engines/places"] == 16 and record["engines/preemptions"] > 0


async def test_an_engine_that_does_not_serve_is_not_looked_at(engine):
    load = EngineLoad(engine, 48, True, loads := Loads())
    seen = []
    await watched(load, lambda: seen.append(1) or len(seen) > 20, engine)
    assert load.places.limit == 8 and not loads.lap()


async def test_an_engine_that_tells_nothing_has_all_its_places_and_it_is_said_once(engine, caplog):
    async def metrics(within):
        raise EngineError("engine http://fake: GET /metrics answered 404: Not Found")

    engine.metrics = metrics
    load = EngineLoad(engine, 48, True, Loads())
    load.serves(True)
    seen = []
    await watched(load, lambda: seen.append(1) or len(seen) > 20, engine)
    assert load.places.limit == 48 and caplog.text.count("no metrics") == 1


async def test_engines_are_looked_at_while_they_serve(engine):
    async with serving(engine) as together:
        together.aim(Version(1, 1), "http://weights")
        await together.holding(Version(1, 1), 20)
        async with asyncio.timeout(20):
            while not (record := together.loads.lap()):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0.01)
    assert record["engines/places"] == 8
