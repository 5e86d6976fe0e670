"""Runs of supervised stages that learn from files: no engines, the same rows however often one is begun."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter

import numpy as np
import pytest
from fake_trainer import FakeTrainer
from small_runs import TOKEN, begin_attempt, chat, lines, make_run
from whole_runs import events_of, run_all

from stackrl.runtime.data.files import DataError
from stackrl.runtime.orchestrator.__main__ import FOR_PEOPLE, HOPELESS
from stackrl.runtime.orchestrator.datasets import Dataset
from stackrl.runtime.orchestrator.errors import first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.reading import Reading

ROWS, STEPS, SIZE = 20, 8, 5
ALONE = {"roles": {"trainer": {"processes": 1}}, "environments": [], "checkpoint": {"every": 3}}


def row(number):
    return {"prompt": f"{number}?", "completion": f"no. {number}"}


ALL = [row(number) for number in range(ROWS)]


def write(file, rows):
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(file)


def learning(folder, stage=(), rows=ALL, **stack):
    """A run whose only stage learns ``rows``."""
    path = write(folder / "rows.jsonl", rows)
    stage = {"name": "sums", "type": "supervised", "steps": STEPS, "batch_size": SIZE} | dict(stage)
    stage["data"] = {"path": path} | stage.get("data", {})
    return make_run(folder, **ALONE | stack, stages=[stage])


def texts(micro_batches):
    """What the documents of micro-batches say, in no order."""
    found = []
    for micro in micro_batches:
        for end, length in zip(np.cumsum(micro.lengths), micro.lengths, strict=True):
            found.append(chat()._tokenizer.decode(micro.tokens[end - length : end]))
    return sorted(found)


def learnt(trainer):
    """Optimizer step → what all ranks learnt in it."""
    return {
        index: texts([micro for batch in ranks.values() for micro in batch.micro_batches])
        for index, ranks in trainer.batches.items()
    }


def numbers(said):
    return [int(text.partition("no. ")[2].removesuffix("<|im_end|>")) for text in said]


async def test_a_run_without_engines_learns_every_row_in_every_epoch(tmp_path):
    run = learning(tmp_path)
    trainer = FakeTrainer(run, TOKEN, ranks=2)
    await run_all(run, trainer)
    taken = learnt(trainer)
    assert sorted(taken) == list(range(STEPS)) and {len(rows) for rows in taken.values()} == {SIZE}
    for epoch in (range(4), range(4, 8)):
        assert sorted(number for step in epoch for number in numbers(taken[step])) == list(range(ROWS))
    assert [taken[step] for step in range(4)] != [taken[step] for step in range(4, 8)]
    [batch] = {batch.tokens for batch in trainer.batches[0].values()}
    assert batch == sum(len(chat().answer(f"no. {number}")) for number in numbers(taken[0]))
    assert [end.reason for end in trainer.ended] == ["finished"] * 2
    metrics = lines(run.metrics)
    assert [(m["epoch"], m["rows"]) for m in metrics] == [((n + 1) / 4, SIZE) for n in range(STEPS)]
    assert all("engine_busy" not in m and m["tokens_per_second"] > 0 for m in metrics)
    [ready] = events_of(run, "data_ready")
    assert (ready["rows"], ready["dropped"], ready["sequences"]) == (ROWS, 0, ROWS)


@pytest.mark.slow
async def test_a_trainer_that_starts_again_gets_the_batches_that_it_would_have_got(tmp_path):
    for folder in ("unbroken", "broken", "lost"):
        (tmp_path / folder).mkdir()
    unbroken = FakeTrainer(run := learning(tmp_path / "unbroken"), TOKEN)
    await run_all(run, unbroken)
    for folder in ("broken", "lost"):
        run = learning(tmp_path / folder)
        task = asyncio.create_task(orchestrate(run, TOKEN, []))
        with FakeTrainer(run, TOKEN, stop_at=5):
            async with asyncio.timeout(30):
                while not list(run.checkpoints(run.stack()).glob("step-000003/manifest.json")):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait([task])
        begin_attempt(run)
        if folder == "lost":
            shutil.rmtree(run.data)  # as where the machine is gone: the files are read again
        else:
            write(tmp_path / folder / "rows.jsonl", [])  # nobody looks at them
        again = FakeTrainer(run, TOKEN)
        await run_all(run, again)
        assert learnt(again) == {step: rows for step, rows in learnt(unbroken).items() if step >= 3}


@pytest.mark.slow
async def test_an_orchestrator_that_starts_again_offers_the_batch_that_was_sealed(tmp_path):
    (tmp_path / "unbroken").mkdir()
    unbroken = FakeTrainer(run := learning(tmp_path / "unbroken"), TOKEN)
    await run_all(run, unbroken)
    run = learning(tmp_path)
    trainer = FakeTrainer(run, TOKEN, step_delay=0.2)
    with trainer:
        task = asyncio.create_task(orchestrate(run, TOKEN, []))
        async with asyncio.timeout(30):
            while len(trainer.batches) < 3:  # noqa: ASYNC110 (threads take them)
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(60):
            await orchestrate(run, TOKEN, [])
    assert not trainer.errors and learnt(trainer) == learnt(unbroken)
    assert {index: len(times) for index, times in trainer.trained.items()} == {
        str(n): 1 for n in range(STEPS)
    }


async def test_files_that_changed_under_a_stage_that_has_begun_are_refused(tmp_path):
    run = learning(tmp_path)
    await run_all(run, FakeTrainer(run, TOKEN))
    shutil.rmtree(run.data)
    shutil.rmtree(run.checkpoints(run.stack()) / f"step-{STEPS:06}")
    write(tmp_path / "rows.jsonl", map(row, range(1, ROWS + 1)))
    begin_attempt(run)
    with pytest.raises(BaseExceptionGroup) as error:
        await orchestrate(run, TOKEN, [])
    assert "the files of stage sums, which has begun, hold something else" in str(first_cause(error.value))


@pytest.mark.slow
async def test_a_bad_row_ends_the_run_before_its_first_step(tmp_path):
    rows = [*ALL, {"prompt": "a"}]
    run = learning(tmp_path, rows=rows)
    trainer = FakeTrainer(run, TOKEN)
    with trainer, pytest.raises(BaseExceptionGroup) as error:
        await orchestrate(run, TOKEN, [])
    cause = first_cause(error.value)
    assert isinstance(cause, FOR_PEOPLE) and isinstance(cause, HOPELESS), "its last line says it, once"
    assert f"rows.jsonl:{ROWS + 1}: a row has the key messages" in str(cause)
    assert not trainer.batches


async def test_held_out_rows_are_measured_and_never_learnt(tmp_path):
    run = learning(tmp_path, {"validation": {"share": 0.2, "every": 3}})
    trainer = FakeTrainer(run, TOKEN, ranks=2)
    await run_all(run, trainer)
    measured = {}
    for index, ranks in trainer.batches.items():
        assert len({len(batch.held_out) for batch in ranks.values()}) == 1, "every rank has as many"
        measured[index] = numbers(texts([m for batch in ranks.values() for m in batch.held_out]))
    out = measured[2]
    assert len(out) == 4 and {index: said for index, said in measured.items() if said} == {
        2: out,
        5: out,
        7: out,
    }
    times = Counter(number for rows in learnt(trainer).values() for number in numbers(rows))
    assert set(times) == set(range(ROWS)) - set(out)


async def test_held_out_rows_may_have_files_of_their_own(tmp_path):
    path = write(tmp_path / "out.jsonl", map(row, range(100, 130)))
    run = learning(tmp_path, {"validation": {"path": path, "limit": 7}, "steps": 1})
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer)
    assert numbers(texts(trainer.batches[0][0].held_out)) == list(range(100, 107))
    assert [event["part"] for event in events_of(run, "data_ready")] == ["learnt", "held out"]


def made(run):
    """The only stage's batches, without a run."""
    Reading(run, run.stack(), chat(), {}, lambda stage, rows: True).read()
    return Dataset(run.stack().stages[0], run.stack(), run)


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.5, 7)])
def test_epochs_are_dealt_evenly_over_the_steps(tmp_path, epochs, steps):
    dataset = made(learning(tmp_path, {"epochs": epochs, "steps": steps, "batch_size": 8}))
    works = [dataset.work(step) for step in range(steps)]
    times = Counter(sample.tokens.tobytes() for work in works for sample in work.samples)
    assert sum(times.values()) == epochs * ROWS and max(times.values()) - min(times.values()) <= 1
    sizes = {len(work.samples) for work in works}
    assert max(sizes) <= 8 and max(sizes) - min(sizes) <= 1
    assert works[-1].record["epoch"] == epochs


def test_rows_that_are_dropped_leave_full_steps_or_an_error(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 200}, *ALL[:3]]
    (tmp_path / "one").mkdir()
    dataset = made(learning(tmp_path, {"steps": 4, "data": {"too_long": "drop"}}, rows=rows))
    assert [len(dataset.work(step).samples) for step in range(4)] == [SIZE] * 4
    with pytest.raises(DataError, match=r"has 4 steps, .* but only 3 are left .* say steps: 3 instead"):
        made(
            learning(
                tmp_path / "one",
                {"epochs": 1.0, "steps": 4, "batch_size": 1, "data": {"too_long": "drop"}},
                rows=rows,
            )
        )


def test_nothing_left_to_learn_is_an_error(tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 200}]
    with pytest.raises(DataError, match="no row is left to learn from: 1 are over"):
        made(learning(tmp_path, {"data": {"too_long": "drop"}}, rows=rows))


def test_a_reading_that_is_not_wanted_any_more_leaves_nothing_half_done(tmp_path):
    run = learning(tmp_path)
    assert Reading(run, run.stack(), chat(), {}, lambda stage, rows: False).read() == []
    assert not [path for path in run.data.iterdir() if not path.name.startswith(".")]
    assert len(made(run).work(0).samples) == SIZE
