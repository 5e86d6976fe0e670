"""When whole runs are evaluated: once at each moment, also where a process died in between."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import (
    STACK,
    TOKEN,
    begin_attempt,
    lines,
    make_run,
    reversed_badly,
)
from whole_runs import events_of, run_all, stopped_when

from stackrl.runtime import checkpoints
from stackrl.runtime.orchestrator.errors import first_cause
from stackrl.runtime.orchestrator.evaluations import Evaluations
from stackrl.runtime.orchestrator.loop import orchestrate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


async def test_held_out_environments_are_evaluated_between_steps(tmp_path):
    plan = {
        "every": 2,
        "environments": [{"name": "held", "type": "reverse_text", "args": {"letters": [5, 7]}}],
    }
    run = make_run(tmp_path, evaluate=plan)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    evaluated = [event for event in lines(run.events) if event["event"] == "evaluated"]
    held_out = [(e["when"], e["version"]) for e in evaluated if e["when"].startswith("held-out")]
    assert held_out == [("held-out held", f"1.{step}") for step in (2, 4, 6)]


async def test_a_last_evaluation_that_was_cut_off_is_made_after_all(tmp_path):
    run = make_run(tmp_path)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    run.events.unlink()
    begin_attempt(run)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    assert [(e["when"], e["version"], e["index"]) for e in events_of(run, "evaluated")] == [
        ("after", "2.6", 8)
    ]
    assert not trainer.batches and [end.reason for end in trainer.ended] == ["finished"]


async def test_evaluations_are_no_part_of_a_steps_time(tmp_path):
    run = make_run(tmp_path, evaluate={"every": 4, "environments": STACK["environments"]})
    engine = FakeEngine(reversed_badly)
    plain = engine.generate

    async def slow_when_evaluated(tokens, **options):
        await asyncio.sleep(0 if options["temperature"] else 1.5)
        return await plain(tokens, **options)

    engine.generate = slow_when_evaluated
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    metrics = lines(run.metrics)
    slow = [i for i in range(1, 8) if metrics[i]["time"] - metrics[i - 1]["time"] > 1.5]
    assert slow == [2, 6], "an evaluation came before these"
    assert all(metrics[i][key] < 1.5 for i in slow for key in ("seconds_step", "seconds_rollouts_wait"))


HELD_OUT = {
    "every": 2,
    "environments": [{"name": "held", "type": "reverse_text", "args": {"letters": [5, 7]}}],
}
MOMENTS = [
    ("before", 2),
    ("held-out held", 4),
    ("held-out held", 6),
    ("held-out held", 8),
    ("after", 8),
]


def moments(run):
    return [(event["when"], event["index"]) for event in events_of(run, "evaluated")]


class Died(Exception):
    pass


@pytest.mark.parametrize(
    ("moment", "made"),
    [(MOMENTS[0], True), (MOMENTS[1], False), (MOMENTS[1], True), (MOMENTS[3], False), (MOMENTS[4], True)],
)
async def test_each_is_made_once_though_the_orchestrator_dies_before_or_after_it(
    tmp_path, monkeypatch, moment, made
):
    evaluate, died = Evaluations._evaluate, []

    async def deadly(self, stage, environments, when):
        here = (when, self._training.index) == moment and not died
        if here and not made:
            died.append(when)
            raise Died
        await evaluate(self, stage, environments, when)
        if here:
            died.append(when)
            raise Died

    monkeypatch.setattr(Evaluations, "_evaluate", deadly)
    run = make_run(tmp_path, evaluate=HELD_OUT)
    with FakeTrainer(run, TOKEN):
        with pytest.raises(ExceptionGroup) as caught:
            await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
        assert isinstance(first_cause(caught.value), Died)
        async with asyncio.timeout(60):
            await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    assert moments(run) == MOMENTS


@pytest.mark.parametrize(
    ("last", "checkpoint", "again"),
    [(4, 3, [MOMENTS[1]]), (6, 6, [])],
    ids=["of weights that are rolled back", "of weights that it goes on from"],
)
async def test_one_is_made_again_only_of_weights_that_were_rolled_back(tmp_path, last, checkpoint, again):
    run = make_run(tmp_path, evaluate=HELD_OUT)
    manifest = checkpoints.folder(run.checkpoints(run.stack()), checkpoint) / "manifest.json"
    with FakeTrainer(run, TOKEN, stop_at=last):
        await stopped_when(
            lambda: manifest.exists() and ("held-out held", last) in moments(run),
            run,
        )
    begin_attempt(run)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    told = MOMENTS.index(("held-out held", last)) + 1
    assert moments(run) == [*MOMENTS[:told], *again, *MOMENTS[told:]]


async def test_a_finished_run_that_is_started_again_evaluates_nothing(tmp_path):
    run = make_run(tmp_path, evaluate=HELD_OUT)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    begin_attempt(run)
    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    assert moments(run) == MOMENTS
