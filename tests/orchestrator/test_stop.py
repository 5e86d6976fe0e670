"""A run that is asked to stop ends between two steps, saved; one that a guard stops ends as an error."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, lines, make_run, reversed_badly

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor.guards import Alarm
from stackrl.runtime.orchestrator.errors import GuardStop, OrchestratorError, first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.stop import Stop
from stackrl.runtime.transport.messages import End


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in threads)
            await asyncio.sleep(0.01)


async def stopped(run, trainer, when, engine=None):
    """Run, ask to stop ``when`` that is so, and wait for the end; seconds that it took."""
    stop = Stop()
    with trainer:
        running = asyncio.create_task(orchestrate(run, TOKEN, [engine or FakeEngine(reversed_badly)], stop))
        await until(when)
        stop.ask()
        began = time.monotonic()
        async with asyncio.timeout(30):
            await running
        seconds = time.monotonic() - began
        await until(lambda: len(trainer.ended) == trainer._ranks)
    assert not trainer.errors
    return seconds


def newest(run):
    found = checkpoints.newest(run.checkpoints(run.stack()))
    return checkpoints.index_of(found) if found else 0


@pytest.mark.slow
async def test_the_step_that_runs_is_finished_and_saved(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 100})
    trainer = FakeTrainer(run, TOKEN, ranks=2, step_delay=0.3)
    await stopped(run, trainer, lambda: len(trainer.batches) == 4)
    assert trainer.ended == [End(reason="stopped", save=True)] * 2
    assert newest(run) == len(trainer.batches) == len(lines(run.metrics)) == 4, "no step was begun after it"
    [event] = [event for event in lines(run.events) if event["event"] == "stopped"]
    assert event["index"] == event["saved"] == 4


async def test_while_rollouts_are_waited_for_it_stops_at_once(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 100})
    engine = FakeEngine(reversed_badly)
    plain = engine.generate

    async def never_in_training(tokens, **options):
        if len(trainer.batches) > 3 and options["temperature"]:
            await asyncio.sleep(60)
        return await plain(tokens, **options)

    engine.generate = never_in_training
    trainer = FakeTrainer(run, TOKEN, save_delay=0.3)
    seconds = await stopped(run, trainer, lambda: len(lines_or_none(run)) > 3, engine)
    assert seconds < 20 and newest(run) == len(trainer.batches)


def lines_or_none(run):
    return lines(run.metrics) if run.metrics.exists() else []


@pytest.mark.slow
async def test_nothing_is_saved_twice(tmp_path):
    """What is being saved is waited for."""
    run = make_run(tmp_path, checkpoint={"every": 1})
    trainer = FakeTrainer(run, TOKEN, step_delay=0.2, save_delay=0.2)
    await stopped(run, trainer, lambda: len(trainer.batches) == 3)
    assert trainer.ended == [End(reason="stopped", save=False)]
    assert newest(run) == len(trainer.batches) == 3


async def test_before_the_first_step_and_before_the_trainer_there_is_nothing_to_save(tmp_path):
    run = make_run(tmp_path / "early", stages=STACK["stages"][1:])
    trainer = FakeTrainer(run, TOKEN)
    engine = FakeEngine(reversed_badly, token_delay=60)
    seconds = await stopped(run, trainer, lambda: engine.requests, engine)
    assert seconds < 20 and trainer.ended == [End(reason="stopped", save=False)]
    assert not run.checkpoints(run.stack()).exists()
    stop = Stop()
    stop.ask()
    await orchestrate(make_run(tmp_path / "earlier"), TOKEN, [FakeEngine(reversed_badly)], stop)


@pytest.mark.slow
async def test_says_so_where_stopping_takes_too_long(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 100}, limits={"stop_seconds": 1})
    trainer = FakeTrainer(run, TOKEN, step_delay=4)
    with pytest.raises(ExceptionGroup) as caught:
        await stopped(run, trainer, lambda: len(trainer.batches) == 1)
    assert "limits.stop_seconds: 1" in str(first_cause(caught.value))


@pytest.mark.slow
async def test_a_run_that_is_ending_ends_as_finished(tmp_path):
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN, save_delay=1)
    await stopped(run, trainer, lambda: run.events.exists() and "after" in run.events.read_text())
    assert newest(run) == 8 and trainer.ended == [End(reason="finished", save=False)]
    assert "stopped" not in {event["event"] for event in lines(run.events)}


@pytest.mark.slow
@pytest.mark.parametrize("save", [True, False])
async def test_an_alarm_ends_the_run_after_its_step(tmp_path, monkeypatch, save):
    alarm = Alarm("mismatch", "stage main, step 3: too much", "stop", save)
    monkeypatch.setattr(
        "stackrl.runtime.monitor.alarms.Alarms.after",
        lambda self, record: alarm if record["index"] == 5 else None,
    )
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN)
    with trainer, pytest.raises(GuardStop, match="guard mismatch: stage main, step 3: too much"):
        await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
        await until(lambda: trainer.ended)
    assert trainer.ended == [End(reason="guard mismatch", save=False)]
    assert len(trainer.batches) == 6
    assert newest(run) == (6 if save else 3), "step 6 was to be saved, but its weights may be damaged"


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        "stackrl.runtime.checkpoints.write_manifest",
        "stackrl.runtime.checkpoints.prune",
        "stackrl.runtime.orchestrator.journal.Journal.make_durable",
        "stackrl.runtime.orchestrator.engines.Engines.serve",
        "stackrl.runtime.orchestrator.supervised._demonstration",
        "stackrl.runtime.orchestrator.journal.Journal.plan",
    ],
)
async def test_an_exception_in_any_background_task_ends_the_process(tmp_path, monkeypatch, broken):
    def fault(*_, **__):
        raise ZeroDivisionError(broken)

    monkeypatch.setattr(broken, fault)
    run = make_run(tmp_path, stages=[STACK["stages"][0], STACK["stages"][1] | {"steps": 40}])
    with FakeTrainer(run, TOKEN, step_delay=0.05), pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(30):
            await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    assert isinstance(first_cause(caught.value), ZeroDivisionError)


@pytest.mark.slow
async def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stackrl.runtime.orchestrator.saving.shutil.copy", full)
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN), pytest.raises(ExceptionGroup) as caught:
        await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    cause = first_cause(caught.value)
    assert isinstance(cause, OrchestratorError)
    assert "step-000003 could not be cut" in str(cause) and "No space left" in str(cause)
