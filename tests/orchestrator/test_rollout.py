"""One rollout: turns, limits, and failures that are data."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from fake_engine import FakeEngine, routes_of
from served_engines import serving
from small_runs import chat, reversed_well, word_in

from stackrl.runtime.environments import make
from stackrl.runtime.orchestrator.errors import BadInput, OrchestratorError
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.environments import Environment

LIMITS = Limits(turn=9, sequence=128, seconds=5.0, temperature=1.0)


def assignment(type="reverse_text", **args):
    environment = make(Environment(name="it", type=type, args=args))
    return Assignment(4, 2, "it", environment, environment.task(Random(0)), Seeds(0).branch("sample", 2))


async def rolled(what, engine, limits=LIMITS):
    async with serving(engine) as engines, engines.serving(what.group) as generate:
        return await roll_out(what, chat(), generate, limits)


async def test_one_turn():
    engine = FakeEngine(reversed_well)
    rollout = await rolled(assignment(letters=[3, 6]), engine)
    assert (rollout.reward, rollout.turns, rollout.id) == (1.0, 1, "4-2")
    [request] = engine.requests
    assert (request["max_tokens"], request["temperature"], request["salt"]) == (9, 1.0, "0.0")
    assert rollout.samples[0].tokens[: len(request["tokens"])].tolist() == request["tokens"]


async def test_each_prompt_goes_on_from_the_tokens_before():
    engine = FakeEngine(lambda prompt, rng: chat().answer("abc"))
    rollout = await rolled(assignment("reverse_text_tries", tries=3), engine)
    prompts = [request["tokens"] for request in engine.requests]
    assert len(prompts) == 3 and rollout.turns == 3
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier) + 4] == earlier + chat().answer("abc")
    assert len({request["seed"] for request in engine.requests}) == 3
    assert rollout.sampled == 12 == rollout.samples[0].loss_mask.sum()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_metric_that_is_no_number_is_a_failed_rollout(value, monkeypatch):
    """A moving mean would not forget it."""
    what = assignment()
    plain = what.environment.reply

    async def reply(task, answers):
        outcome = await plain(task, answers)
        return replace(outcome, metrics={**outcome.metrics, "solved": value})

    monkeypatch.setattr(what.environment, "reply", reply)
    with pytest.raises(RolloutError, match=f"it: ValueError: metric solved: {value}"):
        await rolled(what, FakeEngine(reversed_well))


async def test_answers_at_leisure_take_none_of_the_time(monkeypatch):
    what, limits = assignment(), Limits(turn=9, sequence=128, seconds=1.0, temperature=1.0)
    engine = FakeEngine(reversed_well)

    async def slow(generate, *arguments, **options):
        await asyncio.sleep(2.0)
        return await generate(*arguments, **options)

    async with serving(engine) as engines, engines.serving(what.group) as generate:
        asked = partial(slow, generate)
        assert (await roll_out(what, chat(), asked, limits, at_leisure=True)).turns == 1
        with pytest.raises(RolloutError, match=r"over 1 s \(sampling\.timeout\)"):
            await roll_out(what, chat(), asked, limits)

        async def hang(task, answers):
            await asyncio.sleep(600)

        monkeypatch.setattr(what.environment, "reply", hang)
        with pytest.raises(RolloutError, match=r"over 1 s .* when the environment was to judge answer 1"):
            await roll_out(what, chat(), generate, limits, at_leisure=True)


async def test_who_answers_can_end_the_run():
    async def gone(*arguments, **options):
        raise BadInput("there is no such model")

    with pytest.raises(BadInput, match="there is no such model"):
        await roll_out(assignment(), chat(), gone, LIMITS)


async def test_routes_are_asked_for_once_per_token():
    engine = FakeEngine(lambda prompt, rng: chat().answer("abc"))
    engine.tells_routes = True
    rollout = await rolled(assignment("reverse_text_tries", tries=3), engine)
    [sample] = rollout.samples
    assert sample.routes[:-1].tolist() == routes_of(sample.tokens[:-1].tolist()).tolist()
    first, second, _ = (len(request["tokens"]) for request in engine.requests)
    assert [request["routes_from"] for request in engine.requests] == [0, first + 3, second + 3]
    engine.tells_routes = False
    assert (await rolled(assignment(), engine)).samples[0].routes is None


async def test_answers_are_as_long_as_there_is_room():
    what = assignment("reverse_text_tries", letters=[4, 4])
    engine = FakeEngine(lambda prompt, rng: chat().answer("abcdefgh"))
    start = len(chat().prompt(what.task.messages))
    rollout = await rolled(what, engine, Limits(turn=9, sequence=start + 12, seconds=5, temperature=1.0))
    assert rollout.turns == 1, "the second turn's prompt leaves no room"
    assert len(rollout.samples[0].tokens) == max(len(rollout.samples[0].tokens), start + 9)
    with pytest.raises(RolloutError, match="leaves no room for an answer"):
        await rolled(what, engine, Limits(turn=9, sequence=start, seconds=5, temperature=1.0))


@pytest.mark.parametrize("where", ["engine", "environment"])
async def test_the_time_limit_covers_engine_and_environment(where, monkeypatch):
    what = assignment()
    engine = FakeEngine(reversed_well, token_delay=10.0 if where == "engine" else 0.0)
    if where == "environment":
        monkeypatch.setattr(type(what.environment), "reply", lambda *_: asyncio.sleep(10))
    doing = (
        "the engine was to give answer 1" if where == "engine" else "the environment was to judge answer 1"
    )
    with pytest.raises(RolloutError, match=rf"it: over 0.1 s \(sampling.timeout\) when {doing}"):
        await rolled(what, engine, Limits(turn=9, sequence=128, seconds=0.1, temperature=1.0))
    assert engine.running == 0, "the request was taken back"


async def test_an_environment_that_fails_or_gives_no_number_is_no_reward(monkeypatch):
    what = assignment()

    async def fail(*_):
        raise KeyError("no such task")

    monkeypatch.setattr(type(what.environment), "reply", fail)
    with pytest.raises(RolloutError, match="it: KeyError: 'no such task'"):
        await rolled(what, FakeEngine(reversed_well))
    monkeypatch.undo()
    monkeypatch.setattr("stackrl.runtime.environments.reverse_text.similarity", lambda *_: float("nan"))
    with pytest.raises(RolloutError, match=r"reward .*nan"):
        await rolled(what, FakeEngine(reversed_well))


async def test_an_environment_that_blocks_is_left_behind(monkeypatch):
    """Its thread is: the event loop goes on meanwhile, and the next reply is given on a new thread."""
    monkeypatch.setattr("stackrl.runtime.orchestrator.judging.BLOCKED_SECONDS", 0.2)
    engine, what = FakeEngine(reversed_well), assignment(letters=[3, 6])
    plain = type(what.environment).reply

    async def block(*_):
        time.sleep(2)  # noqa: ASYNC251 (what it must not do)

    monkeypatch.setattr(type(what.environment), "reply", block)
    began = time.monotonic()
    with pytest.raises(RolloutError, match="when the environment was to judge answer 1"):
        await rolled(what, engine, Limits(turn=9, sequence=128, seconds=0.2, temperature=1.0))
    monkeypatch.setattr(type(what.environment), "reply", plain)
    assert (await rolled(what, engine)).reward == 1.0
    assert time.monotonic() - began < 1.5


async def test_an_environment_that_would_end_the_process_fails_its_rollout(monkeypatch):
    """By itself, and by a task that it leaves behind; the next reply is given as ever."""
    engine, what = FakeEngine(reversed_well), assignment(letters=[3, 6])
    plain = type(what.environment).reply

    async def leave():
        raise SystemExit("enough")

    async def leave_behind(self, task, answers):
        self.left = asyncio.create_task(leave())
        return await plain(self, task, answers)

    async def exit_now(*_):
        sys.exit("enough")

    monkeypatch.setattr(type(what.environment), "reply", exit_now)
    with pytest.raises(
        RolloutError, match=r"it: RuntimeError: the environment raised SystemExit\('enough'\)"
    ):
        await rolled(what, engine)
    monkeypatch.setattr(type(what.environment), "reply", leave_behind)
    assert (await rolled(what, engine)).reward == 1.0
    monkeypatch.setattr(type(what.environment), "reply", plain)
    assert (await rolled(what, engine)).reward == 1.0


async def test_an_environment_that_does_not_let_go_is_left_behind(monkeypatch):
    what = assignment()

    async def hold_on(*_):
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    monkeypatch.setattr(type(what.environment), "reply", hold_on)
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"over 0\.2 s"):
        await rolled(what, FakeEngine(reversed_well), Limits(9, 128, 0.2, 1.0))
    assert time.monotonic() - began < 1.5


async def test_an_environments_own_timeout_or_cancellation_is_its_failure(monkeypatch):
    what = assignment()
    for error, name in (
        (TimeoutError("of its own"), "TimeoutError"),
        (asyncio.CancelledError(), "cancelled"),
    ):

        async def fail(*_, error=error):
            raise error

        monkeypatch.setattr(type(what.environment), "reply", fail)
        with pytest.raises(RolloutError, match=name):
            await rolled(what, FakeEngine(reversed_well))


async def test_no_turn_begins_during_an_update_and_newer_versions_overtake():
    engine = FakeEngine(reversed_well, update_delay=0.2)
    async with serving(engine) as engines:
        await engines.holding(Version(0, 0), 2)
        engines.aim(Version(1, 1), "source")
        await asyncio.sleep(0.05)
        engines.aim(Version(1, 2), "source")
        engines.aim(Version(1, 3), "source")
        await rolled_on(engines)
        [request] = engine.requests
        assert request["salt"] == str(request["held"]) == "1.3"
        await engines.holding(Version(1, 3), 2)
        assert [version.step for version, _ in engine.updates] == [1, 3], "the one between is skipped"
        with pytest.raises(OrchestratorError, match=r"the engines hold 1.3 and did not get 1.4 within 0 s"):
            await engines.holding(Version(1, 4), 0.05)


async def rolled_on(engines):
    what = assignment()
    async with engines.serving(0) as generate:
        return await roll_out(what, chat(), generate, LIMITS)


async def test_a_token_keeps_the_version_that_made_it():
    engine = FakeEngine(lambda prompt, rng: chat().answer(word_in(prompt)), token_delay=0.02)
    async with serving(engine) as engines:
        rolling = asyncio.create_task(rolled_on(engines))
        await asyncio.sleep(0.05)
        engines.aim(Version(1, 1), "source")
        [sample] = (await rolling).samples
        assert [span.version for span in sample.spans] == [Version(0, 0), Version(1, 1)]
        assert sample.oldest() == Version(0, 0)
