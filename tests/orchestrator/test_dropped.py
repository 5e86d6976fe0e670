"""Rollouts and groups that whole runs drop: failed, without signal, stale."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine, refuse
from fake_trainer import FakeTrainer
from small_runs import (
    TOKEN,
    lines,
    make_run,
    reversed_badly,
    reversed_well,
    word_in,
)
from whole_runs import PROMPTS, algorithm, run_all

from stackrl.runtime.orchestrator.errors import OrchestratorError, first_cause
from stackrl.runtime.orchestrator.seeds import Seeds, turn_seed
from stackrl.runtime.transport.messages import Span, Version

pytestmark = pytest.mark.usefixtures("quick")


async def test_failed_rollouts_are_retried_then_shrink_their_group(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)
    failed: list[str] = []
    seeds: list[int] = []

    def fail_some(request):
        group, number, *_ = request["id"].split("-")
        if request["temperature"] and number == "3" and int(group) % 2:
            failed.append(group)
            seeds.extend([request["seed"]] if group == "1" else [])
            refuse(request)

    engine.fault = fail_some
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    assert failed.count("1") == 2, "once, and once more"
    first = turn_seed(Seeds(3).branch("rl", "main", "prompt", 1, "sample", 3), 0)
    assert seeds[0] == first != seeds[1], "the second time by a seed of its own"
    rl = lines(run.metrics)[2:]
    assert sum(m["rollouts"] for m in rl) == 6 * 16 - 12
    for batch in trainer.steps()[2:]:
        advantages = np.concatenate([part.advantages for part in batch.micro_batches])
        assert abs(advantages.sum()) < 1e-5, "the shrunk group is centred on its own mean"
    dropped = [event for event in lines(run.events) if event["event"] == "dropped"]
    assert {event["reason"] for event in dropped} == {"failed"} and "refused" in dropped[0]["error"]


@pytest.mark.slow
async def test_gives_up_when_everything_fails(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)
    engine.fault = lambda request: refuse(request) if len(engine.requests) > 2 * PROMPTS else None
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), engine)
    cause = first_cause(caught.value)
    assert isinstance(cause, OrchestratorError)
    assert "'main'" in str(cause) and "connection refused" in str(cause)


@pytest.mark.slow
async def test_a_rollout_over_its_time_is_a_failure_not_a_reward(tmp_path):
    run = make_run(tmp_path, sampling={"max_tokens": 9, "timeout": 0.5})
    engine = FakeEngine(reversed_well)
    plain = engine.generate

    async def slow_for_one(tokens, **options):
        if (
            options["temperature"]
            and options["request_id"].startswith("0-2-")
            and len(engine.requests) >= 2 * PROMPTS
        ):
            await asyncio.sleep(30)
        return await plain(tokens, **options)

    engine.generate = slow_for_one
    await run_all(run, FakeTrainer(run, TOKEN, step_delay=0.05), engine)
    # all others answer right: had the slow one been a reward of zero, its group would have a signal
    assert all(m["reward"] == 1.0 for m in lines(run.metrics)[2:])


@pytest.mark.slow
async def test_refill_replaces_groups_without_signal_and_gives_up_in_the_end(tmp_path):
    run = make_run(tmp_path, algorithm=algorithm(no_signal="refill"))
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_well))
    assert "no_signal: keep" in str(first_cause(caught.value))


@pytest.mark.slow
async def test_tokens_older_than_the_bound_are_never_trained(tmp_path):
    """An engine that labels its tokens with an older version: its groups are dropped, then the run ends."""
    run = make_run(tmp_path, algorithm=algorithm(max_staleness=0))
    engine = FakeEngine(reversed_badly)
    plain = engine.generate

    async def old_labels(tokens, **options):
        generation = await plain(tokens, **options)
        old = Version(1, 0)
        return replace(generation, spans=[Span(span.start, span.end, old) for span in generation.spans])

    engine.generate = old_labels
    trainer = FakeTrainer(run, TOKEN)
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, trainer, engine)
    said = "groups of 160 rollouts were dropped since the last batch, 160 of them stale"
    assert said in str(first_cause(caught.value))
    assert [batch.step for batch in trainer.steps()] == [0, 0, 0], (
        "step 1 was not trained on tokens of step 0"
    )
    dropped = [event for event in lines(run.events) if event["event"] == "dropped"]
    assert dropped[0]["reason"] == "stale" and len(dropped[0]["lengths"]) == 4


@pytest.mark.slow
async def test_refill_fills_batches_with_signal(tmp_path):
    run = make_run(tmp_path, algorithm=algorithm(no_signal="refill"))

    def mixed(prompt, rng):
        answer = reversed_well if ord(word_in(prompt)[0]) % 2 else reversed_badly
        return answer(prompt, rng)

    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(mixed))
    metrics = lines(run.metrics)[2:]
    assert all(m["group_signal"] == 1.0 and m["staleness_max"] <= 1 for m in metrics)
    assert sum(m.get("dropped/no_signal", 0) for m in metrics) > 0
