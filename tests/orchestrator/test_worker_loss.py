"""Runs whose environment is led by worker processes, which are killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fake_engine import FakeEngine
from fake_roles import gone
from fake_trainer import FakeTrainer
from served_engines import serving
from small_runs import TOKEN, chat, lines, make_run
from whole_runs import events_of, run_all

from stackrl.runtime.environments import make
from stackrl.runtime.environments.workers import close_workers
from stackrl.runtime.environments.workers import pool as pools
from stackrl.runtime.inference.client import EngineLost
from stackrl.runtime.orchestrator.rollout import (
    Assignment,
    Limits,
    RolloutError,
    roll_out,
    roll_out_somewhere,
)
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.schemas.environments import Environment

LED = f"{Path(__file__).parents[1] / 'led_environment.py'}:Led"
LIMITS = Limits(turn=9, sequence=256, seconds=30.0, temperature=1.0)


def led(failures="retry", **args):
    described = {"name": "led", "type": "python", "args": {"path": LED, "args": args}, "failures": failures}
    return described


def assignment(**changes):
    environment = make(Environment.model_validate(led(**changes)))
    return Assignment(4, 2, "led", environment, environment.task(Random(0)), Seeds(0).branch("sample", 2))


def last_word(prompt):
    return chat().text(prompt).rpartition("reverse: ")[2].partition("<|im_end|>")[0]


def badly(prompt, rng):
    word = last_word(prompt)
    return chat().answer("".join(rng.choice("xyz") if rng.random() < 0.4 else one for one in word[::-1]))


def pools_here():
    return pools._POOLS.get(asyncio.get_running_loop(), {}).values()


def worker_pids():
    return [worker.pid for pool in pools_here() for worker in pool._workers if worker.alive]


async def test_its_answers_are_one_sequence_whose_sampled_tokens_are_trained():
    what, engine = assignment(turns=3), FakeEngine(badly)
    try:
        async with serving(engine) as engines:
            rollout = await roll_out_somewhere(what, chat(), engines, LIMITS)
    finally:
        await close_workers()
    [sample] = rollout.samples
    first, second, third = (request["tokens"] for request in engine.requests)
    assert second[: len(first)] == first and third[: len(second)] == second, "each prompt goes on"
    assert sample.tokens[: len(third)].tolist() == third
    assert rollout.turns == 3 and rollout.sampled == sample.loss_mask.sum() and rollout.prefix_breaks == 0
    assert rollout.reward == pytest.approx(0.9 * rollout.rewards["right"] + 0.1)
    assert what.environment.tools == () and what.task.messages, "the task is told here as well"
    assert last_word(first) == what.task.messages[0]["content"].removeprefix("reverse: ")


@pytest.mark.parametrize("failures", ["retry", "drop"])
async def test_a_rollout_that_loses_its_worker_begins_anew_or_is_dropped(failures):
    what, killed = assignment(failures=failures), []

    def kill(request):
        if len(killed) < 2:
            killed.extend(worker_pids())
            os.kill(killed[-1], signal.SIGKILL)

    engine = FakeEngine(badly, token_delay=0.01)
    engine.fault = kill
    try:
        async with serving(engine) as engines:
            if failures == "drop":
                with pytest.raises(RolloutError, match="led: the worker of environment 'led' was lost"):
                    await roll_out_somewhere(what, chat(), engines, LIMITS)
            else:
                assert (await roll_out_somewhere(what, chat(), engines, LIMITS)).turns == 2
        assert len(killed) == (1 if failures == "drop" else 2) and engine.running == 0
    finally:
        await close_workers()


async def test_a_rollout_that_every_worker_dies_of_fails(monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.rollout.LOSSES", 2)
    what, engine = assignment(), FakeEngine(badly, token_delay=0.01)
    engine.fault = lambda request: os.kill(worker_pids()[-1], signal.SIGKILL)
    try:
        async with serving(engine) as engines:
            with pytest.raises(RolloutError, match="lost its worker 2 times"):
                await roll_out_somewhere(what, chat(), engines, LIMITS)
    finally:
        await close_workers()


async def test_its_time_limit_and_its_lost_engine_are_those_of_any_rollout():
    what = assignment(pause=60.0)
    try:
        async with serving(FakeEngine(badly)) as engines, engines.serving(0) as generate:
            await what.environment.ready()
            with pytest.raises(RolloutError, match=r"led: over 1 s \(sampling.timeout\)"):
                await roll_out(what, chat(), generate, Limits(9, 256, 1.0, 1.0))

            async def lost(*_, **__):
                raise EngineLost("it has gone")

            with pytest.raises(EngineLost):
                await roll_out(what, chat(), lost, LIMITS)
    finally:
        await close_workers()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_what_all_rollouts_lose_together_is_one_failure(tmp_path):
    """All of two batches are under way in the one worker, and none of them begins anew."""
    run = make_run(
        tmp_path,
        environments=[led("drop", pause=0.5)],
        stages=[{"name": "main", "type": "rl", "steps": 2}],
        trainer={"sequence_length": 256},
        inference={"max_model_length": 256, "concurrency": 32},
    )
    killed = []

    def kill(request):
        running = Counter(pool._workers[0].load for pool in pools_here() if pool._workers)
        if not killed and running[32] and engine.requests[-1]["temperature"]:
            killed.extend(worker_pids())
            os.kill(killed[-1], signal.SIGKILL)

    engine = FakeEngine(badly)
    engine.fault = kill
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert len(killed) == 1 and [record["rollouts"] for record in lines(run.metrics)] == [16, 16]
    failed = [event for event in events_of(run, "dropped") if "error" in event]
    assert len(failed) == 32 and all("was killed by SIGKILL" in event["error"] for event in failed)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
async def test_killing_workers_during_a_run_loses_no_group_and_trains_none_twice(tmp_path):
    run = make_run(
        tmp_path,
        environments=[led(pause=0.01) | {"workers": 2}],
        stages=[{"name": "main", "type": "rl", "steps": 6}],
        trainer={"sequence_length": 256},
        inference={"max_model_length": 256},
    )
    killed = []

    def kill(request):
        """Three of them, each with rollouts under way."""
        due = len(killed) < 3 and len(engine.requests) >= (40, 130, 220)[len(killed)]
        if due and (pids := worker_pids()):
            killed.append(pids[-1])
            os.kill(killed[-1], signal.SIGKILL)

    engine = FakeEngine(badly, token_delay=0.002)
    engine.fault = kill
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    assert len(killed) == 3 and gone(*killed)
    metrics = lines(run.metrics)
    assert [record["rollouts"] for record in metrics] == [16] * 6
    assert all(record["prefix_breaks"] == 0 and record["dropped"] == 0 for record in metrics)
    trained = Counter(
        name
        for ranks in trainer.batches.values()
        for batch in ranks.values()
        for part in batch.micro_batches
        for name in part.documents
    )
    assert len(trained) == 96 and set(trained.values()) == {1}
    assert events_of(run, "dropped") == []
