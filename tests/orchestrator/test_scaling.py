"""Engines that join and leave, and rollouts that go on elsewhere from the turns they have."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest
from fake_engine import FakeEngine
from served_engines import SOURCE, served
from small_runs import chat, reversed_well

from stackrl.runtime.environments import make
from stackrl.runtime.orchestrator.membership import Membership
from stackrl.runtime.orchestrator.progress import Progress
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, roll_out_somewhere
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.transport.messages import Span, Version
from stackrl.schemas.environments import Environment

LIFE = "stackrl.runtime.orchestrator.engine_life"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(f"{LIFE}.RETRY_AFTER", 0.01)
    monkeypatch.setattr(f"{LIFE}.HEALTH_EVERY", 0.05)


def fakes(count, **options):
    return [FakeEngine(reversed_well, url=f"http://engine-{i}", **options) for i in range(count)]


def wrong(prompt, rng):
    return chat().answer("abcdefgh")


def wrong_ones(count, **options):
    return [FakeEngine(wrong, url=f"http://engine-{i}", **options) for i in range(count)]


async def in_turns(run, group=0, tries=4, seconds=5.0):
    """A rollout of ``tries`` turns, for no answer is right."""
    environment = make(Environment(name="it", type="reverse_text_tries", args={"tries": tries}))
    task = environment.task(Random(group))
    what = Assignment(group, 0, "it", environment, task, Seeds(0).branch("sample", group))
    return await roll_out_somewhere(what, chat(), run.engines, Limits(9, 256, seconds, 1.0))


async def test_a_lost_engine_costs_one_turn():
    """The turns before it are neither asked for again nor changed, and their tokens keep their versions."""
    engines = wrong_ones(2, token_delay=0.01)
    async with served(*engines) as run:
        await run.update(1)
        rolling = asyncio.create_task(in_turns(run))
        await run.until(lambda: len(engines[0].requests) == 2)
        await run.update(2)
        await run.until(lambda: len(engines[0].requests) == 3 and engines[0].running)
        engines[0].die()
        rollout = await rolling
    prompts = [request["tokens"] for engine in engines for request in engine.requests]
    assert [len(engine.requests) for engine in engines] == [3, 2]
    assert prompts[2] == prompts[3], "the turn that was open"
    assert rollout.turns == 4 and rollout.prefix_breaks == 0 and rollout.sampled == 4 * 9
    [sample] = rollout.samples
    assert prompts[4] == sample.tokens[: len(prompts[4])].tolist()
    spans = sample.spans
    steps = [span.version.step for span in spans]
    assert steps == sorted(steps) and set(steps) == {1, 2} and steps[-2:] == [2, 2]
    assert sum(span.end - span.start for span in spans) == 4 * 9 == sample.loss_mask.sum()
    assert all(one.end <= other.start for one, other in pairwise(spans))
    assert len({request["seed"] for request in engines[1].requests}) == 2
    assert engines[0].requests[2]["seed"] == engines[1].requests[0]["seed"], "the seed is the turn's"


async def test_neither_the_lost_answer_nor_the_wait_takes_time_of_the_rollout():
    [engine] = wrong_ones(1, token_delay=0.02)
    async with served(engine) as run:
        await run.update(1)
        rolling = asyncio.create_task(in_turns(run, tries=3, seconds=1.2))
        await run.until(lambda: len(engine.requests) == 2 and engine.running)
        engine.die()
        await asyncio.sleep(1.5)
        engine.come_back()
        rollout = await rolling
        assert rollout.turns == 3 and len(engine.requests) == 4


async def test_an_engine_that_leaves_finishes_its_answers_and_hands_over_its_rollouts():
    engines = wrong_ones(2, token_delay=0.01, update_delay=0.01)
    async with served(*engines) as run:
        await run.update(1)
        rolling = [asyncio.create_task(in_turns(run, group=0)) for _ in range(3)]
        await run.until(lambda: engines[0].running == 3)
        run.engines.leave("http://engine-0")
        await run.update(2)
        assert run.engines.version == Version(1, 2), "who leaves is not waited for"
        rollouts = await asyncio.gather(*rolling)
        await run.until(lambda: run.named("engine_left"))
        assert engines[0].closed and not run.named("engine_lost")
        assert len(engines[0].requests) == 3 and len(engines[1].requests) == 9
        assert [version.step for version, _ in engines[0].updates] == [1]
        for rollout in rollouts:
            assert rollout.turns == 4 and rollout.samples[0].loss_mask.sum() == 4 * 9
            assert rollout.samples[0].oldest() == Version(1, 1)
        await run.roll_out(0)
        assert run.engines.urls == run.engines.in_use == ["http://engine-1"]


async def test_answers_that_take_too_long_are_asked_for_elsewhere(monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.engines.LEAVE_LIMIT", 0.1)
    engines = fakes(2)
    engines[0].token_delay = 60.0
    async with served(*engines) as run:
        await run.update(1)
        rolling = asyncio.create_task(run.roll_out(0))
        await run.until(lambda: engines[0].running)
        run.engines.leave("http://engine-0")
        rollout = await rolling
        assert rollout.reward == 1.0 and engines[0].running == 0 and len(engines[1].requests) == 1
        assert rollout.samples[0].spans == [
            Span(span.start, span.end, Version(1, 1)) for span in rollout.samples[0].spans
        ]
        await run.until(lambda: run.named("engine_left"))


async def test_rollouts_that_wait_for_a_place_do_not_wait_for_an_engine_that_leaves():
    engines = wrong_ones(2, token_delay=0.01)
    async with served(*engines, requests=1) as run:
        await run.update(1)
        rolling = [asyncio.create_task(in_turns(run, group=0, tries=2)) for _ in range(3)]
        await run.until(lambda: engines[0].running)
        run.engines.leave("http://engine-0")
        assert [(await one).turns for one in rolling] == [2, 2, 2]
        assert len(engines[0].requests) == 1


async def test_an_engine_that_joins_holds_what_is_wanted_before_it_is_asked():
    engines = fakes(2, update_delay=0.05)
    async with served(engines[0]) as run:
        await run.update(1)
        run.engines.join(engines[1])
        assert (await run.roll_out(1)).reward == 1.0
        await run.until(lambda: run.named("engine_joined"))
        assert run.named("engine_joined")[0]["engine"] == "http://engine-1"
        assert engines[1].updates == [(Version(1, 1), SOURCE)]
        await run.roll_out(1)
        assert [request["held"] for request in engines[1].requests][-1] == Version(1, 1)
        await run.update(2)
        assert [version.step for version, _ in engines[1].updates] == [1, 2]


async def test_an_engine_that_dies_while_it_leaves_ends_nothing():
    engines = wrong_ones(2, token_delay=0.02)
    async with served(*engines, within=0.3) as run:
        await run.update(1)
        rolling = asyncio.create_task(in_turns(run))
        await run.until(lambda: engines[0].running)
        run.engines.leave("http://engine-0")
        engines[0].die()
        assert (await rolling).turns == 4
        await run.until(lambda: run.named("engine_left"))
        await asyncio.sleep(0.5)
        assert not run.task.done()


async def test_the_engines_follow_the_members_of_the_run():
    first, second = fakes(2)
    async with served(first) as run:
        await run.update(1)
        members = Membership(None, run.engines, lambda url, pool: second, Progress(0, 0))
        members.compare({"http://engine-0": "inference"})
        assert run.engines.urls == ["http://engine-0"]
        members.compare({"http://engine-0": "inference", "http://engine-1": "inference"})
        await run.until(lambda: run.named("engine_joined"))
        members.compare({"http://engine-1": "inference"})
        assert run.engines.urls == ["http://engine-1"]
        await run.until(lambda: run.engines.in_use == ["http://engine-1"])
