"""When whole runs are evaluated: once at each moment, also where a process died in between."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine, refuse
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
    run = make_run(tmp_path, evaluate=HELD_OUT)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    held_out = [
        (e["stage"], e["version"], e["index"])
        for e in events_of(run, "evaluated")
        if e["when"] == "held-out held"
    ]
    first, before, *later = held_out
    assert first == ("warmup", "0.0", 0), "the weights that the run begins with"
    assert before == ("main", "1.0", 2) and later == [("main", f"1.{step}", 2 + step) for step in (2, 4, 6)]


async def test_without_a_number_of_steps_held_out_environments_are_evaluated_around_stages(tmp_path):
    held = [{"name": "held", "type": "reverse_text", "sampling": {"temperature": 0.5, "max_tokens": 3}}]
    run = make_run(tmp_path, evaluate={"environments": held, "prompts": 3, "samples": 4})
    engine = FakeEngine(reversed_badly)
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert [when for when, _ in moments(run)] == ["held-out held"] * 2 + ["before"] + [
        "held-out held",
        "after",
    ]
    [first, *_] = events_of(run, "evaluated")
    assert (first["prompts"], first["samples"], first["failed"]) == (3, 4, 0)
    assert {"pass@2", "pass@4", "pass@4_low", "reward_high", "exact_low"} <= first.keys()
    asked = engine.requests[: 3 * 5]
    assert [request["temperature"] for request in asked] == [0.5] * 12 + [0.0] * 3
    assert {request["max_tokens"] for request in asked} == {3}
    assert len({request["seed"] for request in asked[:12]}) == 12, "answers to a prompt differ"
    assert len({tuple(request["tokens"]) for request in asked}) == 3


async def test_an_evaluation_whose_rollouts_all_fail_is_told_and_the_run_learns_on(tmp_path):
    run, engine = make_run(tmp_path, evaluate=HELD_OUT), FakeEngine(reversed_badly)
    engine.fault = lambda request: None if request["temperature"] else refuse(request)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    failed = events_of(run, "evaluation_failed")
    assert [(event["when"], event["index"]) for event in failed] == MOMENTS
    assert all("all 8 rollouts failed; the last one: " in event["error"] for event in failed)
    assert moments(run) == [] and [end.reason for end in trainer.ended] == ["finished"]


@pytest.mark.parametrize(("failures", "left_out"), [("retry", 0), ("drop", 2 * 8)])
async def test_rollouts_of_an_evaluation_that_fail_are_done_once_more_or_left_out(
    tmp_path, failures, left_out
):
    """The first time that each of two prompts in three is answered, it fails."""
    environments = [STACK["environments"][0] | {"failures": failures}]
    run = make_run(tmp_path, environments=environments, evaluate={"prompts": 12})
    engine, seeds = FakeEngine(reversed_badly), {}

    def fail_once(request):
        group, number, *_ = request["id"].split("-")
        if trainer.batches and len(trainer.batches) < 3 and int(group) % 3:
            tried = seeds.setdefault((group, number, request["temperature"]), [])
            tried.append(request["seed"])
            if len(tried) == 1:
                refuse(request)

    engine.fault = fail_once
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    [before, _] = events_of(run, "evaluated")
    assert before["failed"] == left_out
    if failures == "retry":
        assert all(len(set(tried)) == len(tried) for tried in seeds.values())


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
    run = make_run(tmp_path, evaluate={"every": 4, "environments": STACK["environments"], "prompts": 4})
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
    "prompts": 8,
    "environments": [{"name": "held", "type": "reverse_text", "args": {"letters": [5, 7]}}],
}
MOMENTS = [
    ("held-out held", 0),
    ("held-out held", 2),
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
    [
        (MOMENTS[0], False),
        (MOMENTS[0], True),
        (MOMENTS[2], True),
        (MOMENTS[3], False),
        (MOMENTS[3], True),
        (MOMENTS[5], False),
        (MOMENTS[6], True),
    ],
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
    [(4, 3, [MOMENTS[3]]), (6, 6, [])],
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
