"""Whole runs of the orchestrator over the real transport, with a fake engine and a fake trainer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine, refuse
from fake_trainer import SOURCE, FakeTrainer
from small_runs import (
    STACK,
    TOKEN,
    begin_attempt,
    chat,
    lines,
    make_run,
    reversed_badly,
    reversed_well,
    word_in,
)

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor.kept_rollouts import read_steps
from stackrl.runtime.orchestrator.errors import OrchestratorError, first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import Span, Version

PROMPTS = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small evaluations, and retries at once."""
    monkeypatch.setattr("stackrl.runtime.orchestrator.evaluation.PROMPTS", PROMPTS)
    monkeypatch.setattr("stackrl.runtime.orchestrator.reinforcement._RETRY_AFTER", 0.0)
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_life.RETRY_AFTER", 0.0)


def algorithm(**changes):
    return STACK["algorithm"] | changes


async def run_all(run, trainer, *engines):
    with trainer:
        async with asyncio.timeout(60):
            await orchestrate(run, TOKEN, engines)
    assert not trainer.errors


async def stopped_when(condition, run):
    """Run the orchestrator until ``condition``, then end it as SIGTERM does."""
    task = asyncio.create_task(orchestrate(run, TOKEN, [FakeEngine(reversed_badly)]))
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in threads and on disk)
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def first_checkpoint_of(run, trainer, batches):
    """Whether a checkpoint is complete and the trainer has taken ``batches`` batches."""
    folder = run.checkpoints(run.stack())
    return lambda: len(trainer.batches) >= batches and list(folder.glob("*/manifest.json"))


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


async def test_groups_go_to_one_engine_and_all_engines_are_updated(tmp_path):
    run = make_run(tmp_path)
    engines = [FakeEngine(reversed_badly), FakeEngine(reversed_badly)]
    await run_all(run, FakeTrainer(run, TOKEN), *engines)
    assert engines[0].updates == engines[1].updates
    groups = [{request["id"].split("-")[0] for request in engine.requests} for engine in engines]
    assert groups[0] and groups[1] and not groups[0] & groups[1]


async def test_failed_rollouts_are_retried_then_shrink_their_group(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)
    failed: list[str] = []

    def fail_some(request):
        group, number, *_ = request["id"].split("-")
        if request["temperature"] and number == "3" and int(group) % 2:
            failed.append(group)
            refuse(request)

    engine.fault = fail_some
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    assert failed.count("1") == 2, "once, and once more"
    rl = lines(run.metrics)[2:]
    assert sum(m["rollouts"] for m in rl) == 6 * 16 - 12
    for batch in trainer.steps()[2:]:
        advantages = np.concatenate([part.advantages for part in batch.micro_batches])
        assert abs(advantages.sum()) < 1e-5, "the shrunk group is centred on its own mean"
    dropped = [event for event in lines(run.events) if event["event"] == "dropped"]
    assert {event["reason"] for event in dropped} == {"failed"} and "refused" in dropped[0]["error"]


async def test_gives_up_when_everything_fails(tmp_path):
    run = make_run(tmp_path)
    engine = FakeEngine(reversed_badly)
    engine.fault = lambda request: refuse(request) if len(engine.requests) > 2 * PROMPTS else None
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), engine)
    cause = first_cause(caught.value)
    assert isinstance(cause, OrchestratorError)
    assert "'main'" in str(cause) and "connection refused" in str(cause)


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


async def test_refill_replaces_groups_without_signal_and_gives_up_in_the_end(tmp_path):
    run = make_run(tmp_path, algorithm=algorithm(no_signal="refill"))
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_well))
    assert "no_signal: keep" in str(first_cause(caught.value))


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
    assert "40 groups were dropped since the last batch, 40 of them stale" in str(first_cause(caught.value))
    assert [batch.step for batch in trainer.steps()] == [0, 0, 0], (
        "step 1 was not trained on tokens of step 0"
    )
    dropped = [event for event in lines(run.events) if event["event"] == "dropped"]
    assert dropped[0]["reason"] == "stale" and len(dropped[0]["lengths"]) == 4


async def test_refill_fills_batches_with_signal(tmp_path):
    run = make_run(tmp_path, algorithm=algorithm(no_signal="refill"))

    def mixed(prompt, rng):
        answer = reversed_well if ord(word_in(prompt)[0]) % 2 else reversed_badly
        return answer(prompt, rng)

    await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(mixed))
    metrics = lines(run.metrics)[2:]
    assert all(m["group_signal"] == 1.0 and m["staleness_max"] <= 1 for m in metrics)
    assert sum(m.get("dropped/no_signal", 0) for m in metrics) > 0


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


def events_of(run, name):
    return [event for event in lines(run.events) if event["event"] == name]


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


async def test_a_trainer_of_another_step_is_refused(tmp_path):
    run = make_run(tmp_path)
    trainer = FakeTrainer(run, TOKEN)
    trainer.start = 4
    with trainer:
        await stopped_when(lambda: trainer.errors, run)
    assert "resumes at optimizer step 4, the orchestrator at 0" in str(trainer.errors[0])


async def test_names_a_trainer_that_goes_silent(tmp_path, monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.training.FETCH_LIMIT", 0.5)
    run = make_run(tmp_path)
    with FakeTrainer(run, TOKEN, stop_at=3), pytest.raises(ExceptionGroup) as caught:
        await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    cause = first_cause(caught.value)
    assert isinstance(cause, TransportError) and "trainer rank 0 did not fetch batch 3" in str(cause)


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


def documents(ranks):
    """The sequences of an optimizer step as (prompt, all tokens, advantage), in no order."""
    found = []
    for batch in ranks.values():
        for part in batch.micro_batches:
            ends = np.cumsum(part.lengths)
            for end, length, advantage in zip(ends, part.lengths, part.advantages, strict=True):
                tokens = part.tokens[end - length : end]
                first = int(np.argmax(part.loss_mask[end - length : end]))
                found.append((tuple(tokens[:first]), tuple(tokens), round(float(advantage), 6)))
    return sorted(found)
