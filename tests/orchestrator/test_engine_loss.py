"""Whole runs of the orchestrator in which engines die: books and batches are those of any other run."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, lines, make_run, reversed_badly

from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.transport.messages import Version

ROLLOUTS = 6 * 16


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_life.RETRY_AFTER", 0.01)
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_life.HEALTH_EVERY", 0.05)


def make(count):
    return [
        FakeEngine(reversed_badly, token_delay=0.001, update_delay=0.005, url=f"http://engine-{i}")
        for i in range(count)
    ]


async def run_with(run, engines, disturb):
    trainer = FakeTrainer(run, TOKEN, step_delay=0.05)
    with trainer:
        async with asyncio.timeout(60):
            disturbing = asyncio.create_task(disturb(trainer))
            await orchestrate(run, TOKEN, engines)
            await disturbing
    assert not trainer.errors and [end.reason for end in trainer.ended] == ["finished"]
    metrics = lines(run.metrics)
    assert [m["index"] for m in metrics] == list(range(8))
    assert sum(m["rollouts"] for m in metrics[2:]) == ROLLOUTS, "no rollout failed for an engine that died"
    assert all(m["dropped"] == 0 and m["staleness_max"] <= 1 for m in metrics[2:])
    return lines(run.events)


async def reached(trainer, index):
    while len(trainer.batches) < index:  # noqa: ASYNC110 (it is filled by threads)
        await asyncio.sleep(0.005)


def named(events, name):
    return [event for event in events if event["event"] == name]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
async def test_an_engine_dies_in_a_run_and_comes_back(tmp_path, count, max_staleness):
    run = make_run(tmp_path, algorithm=STACK["algorithm"] | {"max_staleness": max_staleness})
    engines = make(count)

    async def disturb(trainer):
        await reached(trainer, 4)
        while not engines[0].running:  # noqa: ASYNC110 (the moment is what counts)
            await asyncio.sleep(0)
        engines[0].die()
        await asyncio.sleep(0.2)
        engines[0].come_back()

    events = await run_with(run, engines, disturb)
    [lost], [back] = named(events, "engine_lost"), named(events, "engine_back")
    assert lost["engine"] == back["engine"] == "http://engine-0" and Version.parse(back["version"]).step >= 1
    dispatched = [Version.parse(r["salt"]) for engine in engines for r in engine.requests]
    held = [r["held"] for engine in engines for r in engine.requests]
    assert dispatched == held, "nothing was asked of an engine that held other weights"


async def test_an_engine_dies_in_the_middle_of_an_update(tmp_path):
    run = make_run(tmp_path)
    engines = make(2)

    async def disturb(trainer):
        dying = asyncio.Event()

        def die(version):
            if version.step == 3:
                engines[1].fault_of_update = lambda version: None
                engines[1].die()
                dying.set()

        engines[1].fault_of_update = die
        await dying.wait()
        await asyncio.sleep(0.2)
        engines[1].come_back()

    events = await run_with(run, engines, disturb)
    assert named(events, "engine_lost")[0]["engine"] == "http://engine-1"
    assert [version.step for version, _ in engines[0].updates] == list(range(7)), "the other went on"
    assert engines[1].updates[-1][0] == Version(1, 6)


@pytest.mark.slow
async def test_all_engines_die_at_once(tmp_path):
    run = make_run(tmp_path)
    engines = make(2)

    async def disturb(trainer):
        for index in (4, 6):
            await reached(trainer, index)
            for engine in engines:
                engine.die()
            await asyncio.sleep(0.1)
            for engine in engines:
                engine.come_back()

    events = await run_with(run, engines, disturb)
    assert len(named(events, "engine_lost")) == 4 == len(named(events, "engine_back"))
