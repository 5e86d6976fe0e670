"""Whole runs that are ended and go on at the cut of a checkpoint, and how checkpoints are completed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import (
    TOKEN,
    begin_attempt,
    chat,
    lines,
    make_run,
    reversed_badly,
)
from whole_runs import algorithm, documents, events_of, first_checkpoint_of, run_all, stopped_when

from stackrl.runtime import checkpoints
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.transport.messages import Version

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


async def test_stops_and_resumes_at_the_cut(tmp_path):
    """The same prompts, samples and batches as in a run that was never stopped."""
    changes = {"algorithm": algorithm(max_staleness=0)}
    unbroken = make_run(tmp_path / "unbroken", **changes)
    whole = FakeTrainer(unbroken, TOKEN)
    await run_all(unbroken, whole, FakeEngine(reversed_badly))

    run = make_run(tmp_path / "broken", **changes)
    first = FakeTrainer(run, TOKEN, stop_at=4)
    with first:
        await stopped_when(first_checkpoint_of(run, first, 4), run)
    assert checkpoints.index_of(checkpoints.newest(run.checkpoints(run.stack()))) == 3
    begin_attempt(run)
    second = FakeTrainer(run, TOKEN, ranks=2)
    assert second.start == 3
    engine = FakeEngine(reversed_badly)
    await run_all(run, second, engine)
    assert engine.updates[0][0] == Version(2, 1)
    for index in range(3, 8):
        assert documents(second.batches[index]) == documents(whole.batches[index])
        assert second.batches[index][0].step == whole.batches[index][0].step
        assert second.batches[index][0].tokens == whole.batches[index][0].tokens


async def test_resumes_asynchronous_work_without_losing_or_repeating_a_prompt(tmp_path):
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN, stop_at=5) as first:
        await stopped_when(first_checkpoint_of(run, first, 5), run)
    begin_attempt(run)
    second = FakeTrainer(run, TOKEN)
    await run_all(run, second, FakeEngine(reversed_badly))
    kept = [first.batches[2], *(second.batches[index] for index in range(3, 8))]
    prompts = [document[0] for ranks in kept for document in documents(ranks)]
    stack = run.stack()
    mix = Mix(stack.environments, Seeds(stack.seed).branch("rl", "main"))
    expected = [tuple(chat().prompt(mix.draw(number).task.messages)) for number in range(24)]
    assert sorted(prompts) == sorted(expected * 4), "the stage's 24 prompts, 4 rollouts each"


async def test_goes_on_past_a_damaged_checkpoint_and_says_so(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 3, "keep": 2})
    folder = run.checkpoints(run.stack())
    with FakeTrainer(run, TOKEN, stop_at=7) as first:
        await stopped_when(lambda: (folder / "step-000006/manifest.json").exists(), run)
    assert len(first.batches) >= 6 and not events_of(run, "resumed"), "a first attempt does not resume"
    (folder / "step-000006/trainer/progress.json").write_text("damaged")
    begin_attempt(run)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    [resumed] = events_of(run, "resumed")
    assert resumed["from"] == str(folder / "step-000003") and resumed["index"] == 3
    assert resumed["damaged"] == [str(folder / "step-000006.damaged")]
    assert {entry.name for entry in folder.iterdir()} == {
        "step-000006.damaged",
        "step-000006",
        "step-000008",
    }


async def test_says_that_it_begins_again_where_there_is_no_checkpoint(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 100})
    with FakeTrainer(run, TOKEN, stop_at=4) as first:
        await stopped_when(lambda: len(first.batches) >= 4, run)
    begin_attempt(run)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    [resumed] = events_of(run, "resumed")
    assert resumed["from"] == "" and resumed["index"] == 0


async def test_a_trainer_of_another_step_is_refused(tmp_path):
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN)
    trainer.start = 4
    with trainer:
        await stopped_when(lambda: trainer.errors, run)
    assert "resumes at optimizer step 4, the orchestrator at 0" in str(trainer.errors[0])


async def test_a_trainer_that_saves_is_not_silent(tmp_path, monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.training.FETCH_LIMIT", 0.5)
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN, save_delay=1.0)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    assert [end.reason for end in trainer.ended] == ["finished"]


async def test_checkpoints_are_completed_in_order_however_long_one_takes(tmp_path, monkeypatch):
    write_manifest = checkpoints.write_manifest

    def slow_for_the_first(checkpoint, facts):
        time.sleep(0.8 if facts["index"] == 1 else 0)
        write_manifest(checkpoint, facts)

    monkeypatch.setattr(checkpoints, "write_manifest", slow_for_the_first)
    run = make_run(tmp_path, checkpoint={"every": 1, "keep": 1})
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    assert [event["index"] for event in lines(run.events) if event["event"] == "checkpoint"] == [*range(1, 9)]
    assert [folder.name for folder in run.checkpoints(run.stack()).iterdir()] == ["step-000008"]


async def test_every_nth_checkpoint_stays_for_good(tmp_path):
    run = make_run(tmp_path, checkpoint={"every": 1, "keep": 1, "keep_every": 3})
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    kept = sorted(folder.name for folder in run.checkpoints(run.stack()).iterdir())
    assert kept == ["step-000003", "step-000006", "step-000008"]


async def test_a_manifest_says_who_made_it_and_how_long_the_run_had_worked(tmp_path):
    run = make_run(tmp_path)
    run.write_state(replace(run.state(), used=12.5))
    await run_all(run, FakeTrainer(run, TOKEN, ranks=2), FakeEngine(reversed_badly))
    manifest = checkpoints.verify(checkpoints.newest(run.checkpoints(run.stack())))
    facts = {name: manifest[name] for name in ("index", "incarnation", "ranks", "used")}
    assert facts == {"index": 8, "incarnation": 1, "ranks": 2, "used": 12.5}
