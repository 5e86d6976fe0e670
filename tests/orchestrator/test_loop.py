"""Whole runs of the orchestrator over the real transport, with a fake engine and a fake trainer."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_trainer import SOURCE, FakeTrainer
from small_runs import (
    TOKEN,
    lines,
    make_run,
    reversed_badly,
)
from whole_runs import PROMPTS, algorithm, run_all

from stackrl.runtime.monitor.kept_rollouts import read_steps
from stackrl.runtime.orchestrator.errors import first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import Version

pytestmark = pytest.mark.usefixtures("quick")


async def test_runs_all_stages_and_ends(tmp_path):
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN)
    engine = FakeEngine(reversed_badly)
    await run_all(run, trainer, engine)
    batches = trainer.steps()
    assert [b.index for b in batches] == list(range(8))
    assert [b.step for b in batches] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert [(b.stage, b.stage_step) for b in batches[:3]] == [("warmup", 0), ("warmup", 1), ("main", 0)]
    assert [b.index for b in batches if b.last_of_stage] == [1, 7]
    assert [b.index for b in batches if b.checkpoint] == [2, 5, 7]
    assert [end.reason for end in trainer.ended] == ["finished"] and engine.closed
    assert [version for version, _ in engine.updates] == [Version(1, step) for step in range(7)]
    assert {source for _, source in engine.updates} == {SOURCE}

    metrics = lines(run.metrics)
    assert [m["index"] for m in metrics] == list(range(8))
    assert [m["kind"] for m in metrics] == ["supervised"] * 2 + ["rl"] * 6
    assert all(m["rollouts"] == 16 and m["prefix_breaks"] == 0 for m in metrics[2:])
    assert 0 < metrics[-1]["reward"] < 1 and metrics[-1]["reward/reverse"] == metrics[-1]["reward"]
    assert metrics[-1]["trainer/loss"] == 0.5
    evaluated = [event for event in lines(run.events) if event["event"] == "evaluated"]
    assert [(e["when"], e["version"]) for e in evaluated] == [("before", "1.0"), ("after", "1.6")]
    assert evaluated[0]["prompts"] == PROMPTS and 0 < evaluated[0]["reward"] < 1


async def test_rollouts_are_kept_for_the_report_with_the_trainers_logprobs(tmp_path):
    run = make_run(tmp_path, monitors={"rollouts": {"every": 2}})
    trainer = FakeTrainer(run, TOKEN, ranks=2)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    assert [batch.index for batch in trainer.steps() if batch.report] == [2, 4, 6]
    kept = {step.about.index: step for step in read_steps(run.path / "rollouts")}
    assert sorted(kept) == [2, 4, 6]
    for index, step in kept.items():
        names = [
            name for b in trainer.batches[index].values() for m in b.micro_batches for name in m.documents
        ]
        assert len(names) == 16 and set(step.logprobs) == set(names)


@pytest.mark.slow
async def test_denominators_and_advantages(tmp_path):
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN, ranks=2)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    for ranks in trainer.batches.values():
        parts = [part for batch in ranks.values() for part in batch.micro_batches]
        assert {batch.tokens for batch in ranks.values()} == {sum(int(p.loss_mask.sum()) for p in parts)}
        assert {batch.sequences for batch in ranks.values()} == {sum(len(p.lengths) for p in parts)}
        assert len({len(batch.micro_batches) for batch in ranks.values()}) == 1
        advantages = np.concatenate([part.advantages for part in parts])
        assert abs(advantages.sum()) < 1e-5
        if ranks[0].stage == "main":
            assert len(advantages) == 16 and advantages.any()
        else:
            assert not advantages.any()


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_staleness_is_bounded_without_dropping(tmp_path, max_staleness):
    run = make_run(tmp_path, algorithm=algorithm(max_staleness=max_staleness))
    engine = FakeEngine(reversed_badly, token_delay=0.002, update_delay=0.01)
    await run_all(run, FakeTrainer(run, TOKEN, step_delay=0.01), engine)
    metrics = lines(run.metrics)[2:]
    assert all(m["staleness_max"] <= max_staleness and m["dropped"] == 0 for m in metrics)
    if max_staleness:
        assert any(m["staleness_max"] > 0 for m in metrics), "nothing ran asynchronously"


async def test_barrier_generates_wholly_on_the_version_being_trained(tmp_path):
    run = make_run(tmp_path, algorithm=algorithm(max_staleness=0))
    engine = FakeEngine(reversed_badly, token_delay=0.001, update_delay=0.02)
    await run_all(run, FakeTrainer(run, TOKEN, step_delay=0.02), engine)
    sampled = [r for r in engine.requests if r["temperature"] > 0]
    training = sampled[PROMPTS:-PROMPTS]  # the evaluations before and after
    assert [r["held"].step for r in training] == [step for step in range(6) for _ in range(16)]
    assert all(r["salt"] == str(r["held"]) for r in engine.requests)


@pytest.mark.slow
async def test_groups_go_to_one_engine_and_all_engines_are_updated(tmp_path):
    run = make_run(tmp_path)
    engines = [FakeEngine(reversed_badly), FakeEngine(reversed_badly)]
    await run_all(run, FakeTrainer(run, TOKEN), *engines)
    assert engines[0].updates == engines[1].updates
    groups = [{request["id"].split("-")[0] for request in engine.requests} for engine in engines]
    assert groups[0] and groups[1] and not groups[0] & groups[1]


@pytest.mark.slow
async def test_every_token_of_several_tries_is_trained_once(tmp_path):
    environment = {"name": "tries", "type": "reverse_text_tries", "args": {"letters": [3, 5]}}
    run = make_run(tmp_path, environments=[environment], sampling={"max_tokens": 4, "timeout": 20.0})
    engine = FakeEngine(reversed_badly)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    metrics = lines(run.metrics)[2:]
    assert all(m["prefix_breaks"] == 0 for m in metrics)
    assert any(m["turns"] > 1.5 for m in metrics)
    for batch, record in zip(trainer.steps()[2:], metrics, strict=True):
        assert batch.tokens == record["tokens_generated"]
        assert batch.sequences == record["rollouts"], "one sequence for all turns of a rollout"


@pytest.mark.slow
async def test_names_a_trainer_that_goes_silent(tmp_path, monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.training.FETCH_LIMIT", 0.5)
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN, stop_at=3), pytest.raises(ExceptionGroup) as caught:
        await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    cause = first_cause(caught.value)
    assert isinstance(cause, TransportError) and "trainer rank 0 did not fetch batch 3" in str(cause)


async def test_names_a_trainer_that_never_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.loop.HELLO_LIMIT", 0.3)
    run = make_run(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    assert "the trainer did not say hello within" in str(first_cause(caught.value))


async def test_an_update_that_fails_is_repeated(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)
    tried = []

    def fault(version):
        tried.append(version.step)
        if tried.count(2) == 1 and version.step == 2:
            raise RuntimeError("a hiccup")

    engine.fault_of_update = fault
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert tried == [0, 1, 2, 2, 3, 4, 5, 6]


@pytest.mark.slow
async def test_an_update_that_fails_twice_ends_the_run(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)

    def fault(version):
        if version.step == 2:
            raise RuntimeError("engine http://fake: update to 1.2 failed")

    engine.fault_of_update = fault
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert "update to 1.2 failed" in str(first_cause(caught.value))
