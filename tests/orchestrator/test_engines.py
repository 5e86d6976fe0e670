"""Engines that die, hang and come back: nothing is asked of one that is away, or that holds other weights."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest
from fake_engine import FakeEngine, refuse
from served_engines import SOURCE, served
from small_runs import reversed_well

from stackrl.runtime.inference.client import EngineError, EngineLost
from stackrl.runtime.orchestrator.errors import OrchestratorError, first_cause
from stackrl.runtime.orchestrator.rollout import (
    LOSSES,
    RolloutError,
)
from stackrl.runtime.transport.messages import Version

LIFE = "stackrl.runtime.orchestrator.engine_life"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(f"{LIFE}.RETRY_AFTER", 0.01)
    monkeypatch.setattr(f"{LIFE}.HEALTH_EVERY", 0.05)


def fakes(count, **options):
    return [FakeEngine(reversed_well, url=f"http://engine-{i}", **options) for i in range(count)]


async def test_a_rollout_whose_engine_dies_begins_anew_on_another():
    engines = fakes(2, token_delay=0.02)
    async with served(*engines) as run:
        await run.update(1)
        rolling = asyncio.create_task(run.roll_out(0))
        await run.until(lambda: engines[0].running)
        engines[0].die()
        rollout = await rolling
        assert rollout.reward == 1.0 and len(engines[1].requests) == 1
        assert [span.version for span in rollout.samples[0].spans] == [Version(1, 1)]
        [lost] = run.named("engine_lost")
        assert lost["engine"] == "http://engine-0" and "connection refused" in lost["reason"]
        await run.update(2)
        assert run.engines.version == Version(1, 2), "the living one is enough"
        await run.roll_out(2)
        assert len(engines[0].requests) == 1


async def test_an_engine_that_comes_back_gets_the_wanted_version_before_it_serves():
    engines = fakes(2, update_delay=0.05)
    async with served(*engines) as run:
        await run.update(1)
        engines[0].die()
        await run.until(lambda: run.named("engine_lost"))
        await run.update(2)
        engines[0].come_back()
        rollouts = [await run.roll_out(0) for _ in range(3)]
        await run.until(lambda: run.named("engine_back"))
        rollouts.append(await run.roll_out(0))
        assert {span.version for r in rollouts for s in r.samples for span in s.spans} == {Version(1, 2)}
        assert [version.step for version, _ in engines[0].updates] == [1, 2]
        assert run.named("engine_back")[0]["version"] == "1.2" and engines[0].requests
        assert [event["version"] for event in run.named("weights_updated")] == ["1.1", "1.2"]


async def test_a_restart_that_nobody_saw_is_found_by_the_label():
    """The process is another one within two questions: its tokens are refused, and it is updated first."""
    [engine] = fakes(1)
    async with served(engine, silence=5) as run:
        await run.update(1)
        engine.held = Version(0, 0)
        rollout = await run.roll_out(0)
        assert [span.version for span in rollout.samples[0].spans] == [Version(1, 1)]
        assert [version.step for version, _ in engine.updates] == [1, 1]
        assert "holds 0.0 instead of 1.1" in run.named("engine_lost")[0]["reason"]
        engine.held = Version(0, 0)
        await run.until(lambda: len(engine.updates) == 3)
        assert len(engine.requests) == 2, "it was found by asking too"


async def test_waiting_for_the_only_engine_takes_none_of_the_rollouts_time_nor_tries():
    [engine] = fakes(1, token_delay=0.01)
    async with served(engine) as run:
        await run.update(1)
        rolling = asyncio.create_task(run.roll_out(0, seconds=0.4))
        await run.until(lambda: engine.running)
        engine.die()
        await asyncio.sleep(0.6)
        assert not rolling.done() and not run.engines.serving_now
        engine.come_back()
        assert (await rolling).reward == 1.0
        await run.engines.holding(Version(1, 1), 1)


async def test_a_silent_engine_is_lost_and_its_rollout_does_not_fail():
    """Its own limit ends the rollout first; the engine is then asked, and takes the blame."""
    engines = fakes(2, token_delay=0.001)
    async with served(*engines) as run:
        await run.update(1)
        engines[0].hang()
        rollout = await run.roll_out(0, seconds=0.1)
        assert rollout.reward == 1.0 and len(engines[1].requests) == 1
        assert "got no answer in 0.3 s" in run.named("engine_lost")[0]["reason"]
        engines[0].go_on()
        await run.until(lambda: run.named("engine_back"))
        assert len(engines[0].updates) == 1, "it still holds what is wanted"


async def test_a_rollout_that_fails_on_a_living_engine_has_failed():
    [engine] = fakes(1)
    engine.fault = refuse
    async with served(engine) as run:
        with pytest.raises(RolloutError, match="answered 500"):
            await run.roll_out(0)
        assert len(engine.requests) == 1 and not run.named("engine_lost")


async def test_a_rollout_that_every_engine_dies_of_fails():
    [engine] = fakes(1)

    def die_of_it(request):
        engine.die()
        asyncio.get_running_loop().call_later(0.02, engine.come_back)

    engine.fault = die_of_it
    async with served(engine) as run:
        with pytest.raises(RolloutError, match=f"lost its engine {LOSSES} times; .*http://engine-0"):
            await run.roll_out(0)
        assert len(engine.requests) == LOSSES == len(run.named("engine_lost"))


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_an_engine_that_is_lost_in_an_update_gets_it_later_and_the_others_go_on(how):
    engines = fakes(2)
    async with served(*engines, silence=5) as run:
        await run.update(1)
        engines[0].fault_of_update = lambda version: engines[0].die() if how == "dies" else engines[0].hang()
        await run.update(2)
        await run.roll_out(0)
        await run.until(lambda: run.named("engine_lost"))
        [lost] = run.named("engine_lost")
        expected = "connection refused" if how == "dies" else "POST /update_weights got no answer in 0.5 s"
        assert lost["engine"] == "http://engine-0" and expected in lost["reason"]
        await run.roll_out(0)
        assert len(engines[1].requests) == 2 and run.engines.version == Version(1, 2)
        engines[0].fault_of_update = lambda version: None
        engines[0].come_back() if how == "dies" else engines[0].go_on()
        await run.update(3)
        await run.until(lambda: run.named("engine_back"))
        assert engines[0].updates[-1][0] == Version(1, 3)


async def test_weights_of_no_version_are_not_used():
    """What an update that was broken off leaves: the engine serves once there is something to load."""
    [engine] = fakes(1)
    engine.held = None
    async with served(engine) as run:
        rolling = asyncio.create_task(run.roll_out(0))
        await asyncio.sleep(0.1)
        assert not engine.requests and not run.engines.serving_now
        run.engines.aim(Version(3, 7), SOURCE)
        assert (await rolling).samples[0].oldest() == Version(3, 7)


async def test_an_engine_that_holds_the_wanted_version_is_not_updated():
    """As an orchestrator that was started again finds it."""
    [engine] = fakes(1)
    engine.held = Version(1, 4)
    async with served(engine) as run:
        await run.update(4)
        assert run.engines.version == Version(1, 4) and not engine.updates
        assert not run.named("weights_updated")
        assert [name for name, _ in run.events] == ["engines_ready"]


async def test_waits_for_one_engine_and_not_for_all():
    engines = fakes(2)
    engines[1].die()
    async with served(*engines) as run:
        await run.update(1)
        await run.roll_out(1)
        assert not run.named("engines_ready")
        engines[1].come_back()
        await run.until(lambda: run.named("engines_ready"))
        await run.roll_out(1)
        assert [len(engine.requests) for engine in engines] == [1, 1]
        assert not run.named("engine_back") and not run.named("engine_lost")


async def test_an_engine_that_stays_away_is_named():
    engines = fakes(2)
    async with served(*engines, within=1.0) as run:
        await run.update(1)
        engines[1].die()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(30):
                await run.task
        cause = first_cause(caught.value)
        assert isinstance(cause, EngineError) and "http://engine-1 was not ready within" in str(cause)


async def test_an_engine_that_dies_whenever_it_is_updated_is_named():
    [engine] = fakes(1)
    async with served(engine, within=1.0) as run:
        await run.update(1)

        def fault(version):
            raise EngineLost("engine http://engine-0: POST /update_weights failed: reset")

        engine.fault_of_update = fault
        run.engines.aim(Version(1, 2), SOURCE)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(30):
                await run.task
        assert (
            "http://engine-0 did not serve within 1 s: engine http://engine-0: POST /update_weights"
            in str(first_cause(caught.value))
        )


async def test_what_nobody_holds_is_said_with_the_state_of_each_engine():
    engines = fakes(2)
    async with served(*engines) as run:
        await run.update(1)
        engines[1].die()
        await run.until(lambda: run.named("engine_lost"))
        with pytest.raises(
            OrchestratorError,
            match=r"hold 1.1 and did not get 1.2 .*engine-0 serving, http://engine-1 lost: .*refused",
        ):
            await run.engines.holding(Version(1, 2), 0.05)


async def test_rollouts_that_wait_for_a_place_leave_a_lost_engine():
    engines = fakes(2, token_delay=0.01)
    async with served(*engines, requests=1) as run:
        await run.update(1)
        rolling = [asyncio.create_task(run.roll_out(0)) for _ in range(4)]
        await run.until(lambda: engines[0].running)
        engines[0].die()
        assert [(await one).reward for one in rolling] == [1.0] * 4
        assert len(engines[0].requests) == 1 and len(engines[1].requests) == 4


@pytest.mark.slow
async def test_chaos_ends_with_every_rollout_done_on_the_version_of_its_time():
    """Engines die, hang and come back at random while versions rise: no rollout fails, none is too old."""
    rng = Random(7)
    engines = fakes(3, token_delay=0.002, update_delay=0.005)
    ends = time.monotonic() + 2.0

    async def disturb(run):
        while time.monotonic() < ends:
            engine = rng.choice(engines)
            rng.choice([engine.die, engine.hang])()
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            engine.come_back()

    async def publish(run):
        for step in range(2, 40):
            if time.monotonic() > ends:
                return
            await asyncio.sleep(0.05)
            run.engines.aim(Version(1, step), SOURCE)

    async with served(*engines, silence=0.15, timeout=0.2, within=20) as run:
        await run.update(1)
        tasks = [asyncio.create_task(disturb(run)), asyncio.create_task(publish(run))]
        group = 0
        while time.monotonic() < ends:
            admitted = run.engines.version
            rollouts = await asyncio.gather(*(run.roll_out(group + i, seconds=2.0) for i in range(6)))
            group += 6
            assert all(r.reward == 1.0 and r.samples[0].oldest() >= admitted for r in rollouts)
        await asyncio.gather(*tasks)
        assert group > 20 and len(run.named("engine_lost")) > 3
        await run.until(lambda: all(life.alive for life in run.engines._lives))
