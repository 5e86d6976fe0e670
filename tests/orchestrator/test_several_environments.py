"""Runs over several environments, each with its own groups, sampling, component and policy for failures."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, lines, make_run, reversed_badly, word_in
from whole_runs import algorithm, events_of, run_all, stopped_when

from stackrl.runtime.inference.client import EngineError
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.recipes import recipes
from stackrl.runtime.transport.messages import CE, RL
from stackrl.schemas.stack import Stack, longest_rollout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
SMALL = {"name": "small", "type": "reverse_text", "args": {"letters": [3, 4]}, "group_size": 3, "weight": 2.0}
LARGE = {
    "name": "large",
    "type": "reverse_text",
    "args": {"letters": [5, 6]},
    "group_size": 5,
    "sampling": {"temperature": 0.7, "max_tokens": 4},
    "component": "ce",
}
SIZES = {"small": 3, "large": 5}


def make(tmp_path, **changes):
    return make_run(
        tmp_path, **{"environments": [SMALL, LARGE], "algorithm": algorithm(max_staleness=2)} | changes
    )


def groups_of(run):
    """Environment, size, and the batch of each rollout, by group."""
    with contextlib.closing(sqlite3.connect(run.journal / "journal.sqlite")) as db:
        found = {}
        for group, environment, size in db.execute("SELECT id, environment, size FROM groups"):
            rows = db.execute("SELECT state, batch FROM rollouts WHERE group_id = ?", (group,)).fetchall()
            found[group] = (environment, size, rows)
        return found


async def test_each_environment_has_its_own_groups_sampling_and_component(tmp_path):
    run, engine = make(tmp_path), FakeEngine(reversed_badly, token_delay=0.001)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, engine)
    groups = groups_of(run)
    assert {environment for environment, _, _ in groups.values()} == set(SIZES)
    assert all(size == SIZES[name] == len(rows) for name, size, rows in groups.values())
    batches = Counter()
    for _, _, rows in groups.values():
        assert len(set(rows)) == 1 and rows[0][0] in ("applied", "durable"), "trained, and as a whole"
        batches[rows[0][1]] += len(rows)
    assert sorted(batches) == list(range(2, 8)) and all(16 <= count < 16 + 5 for count in batches.values())

    how = {"small": set(), "large": set()}
    for request in engine.requests:
        if request["temperature"]:
            name = "small" if len(word_in(request["tokens"])) < 5 else "large"
            how[name].add((request["temperature"], request["max_tokens"]))
    assert how == {"small": {(1.0, 9)}, "large": {(0.7, 4)}}

    for batch in trainer.steps()[2:]:
        for part in batch.micro_batches:
            for end, length, temperature in zip(
                np.cumsum(part.lengths), part.lengths, part.temperatures, strict=True
            ):
                marks = set(part.loss_mask[end - length : end].tolist()) - {0}
                assert marks == {CE if temperature == np.float32(0.7) else RL}
    record = lines(run.metrics)[-1]
    assert {"reward/small", "reward/large", "length/small", "length/large"} <= record.keys()


async def test_groups_of_several_sizes_survive_a_restart(tmp_path):
    run = make(tmp_path)
    with FakeTrainer(run, TOKEN, step_delay=0.05) as trainer:
        await stopped_when(lambda: len(trainer.batches) >= 5, run)
        async with asyncio.timeout(60):
            await orchestrate(run, TOKEN, [FakeEngine(reversed_badly)])
    assert not trainer.errors
    rows = [row for _, _, rows in groups_of(run).values() for row in rows]
    assert {state for state, _ in rows} <= {"applied", "durable"}
    trained = [
        name for step in list(trainer.trained.values())[2:] for documents in step for name in documents
    ]
    assert len(trained) == len(set(trained)) == len(rows), "none is lost, none is trained twice"


@pytest.mark.parametrize(("policy", "requests"), [("retry", 2), ("drop", 1)])
async def test_failures_are_tried_again_by_policy(tmp_path, policy, requests):
    """One rollout's engine refuses each time."""
    run = make(tmp_path, environments=[SMALL | {"failures": policy}])
    engine, refused = FakeEngine(reversed_badly), Counter()

    def fault(request):
        if request["id"].startswith("1-0-") and request["temperature"] and 16 < len(engine.requests) < 90:
            refused["1-0"] += 1
            raise EngineError("engine http://fake: refused")

    engine.fault = fault
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert refused["1-0"] == requests
    [dropped] = [event for event in events_of(run, "dropped") if event["reason"] == "failed"]
    assert dropped["environment"] == "small"
    assert Counter(state for state, _ in groups_of(run)[1][2])["dropped"] == 1, "its group went on without it"


def test_what_rollouts_are_made_from_is_their_own_environments():
    def recipe(**changes):
        return recipes(Stack.model_validate(STACK | {"environments": [SMALL, LARGE | changes]}))["main"]

    before = recipe()
    assert recipe(advantage={"type": "leave_one_out"}) == recipe(component="rl") == before
    assert recipe(failures="drop") == recipe(sampling=LARGE["sampling"] | {"timeout": 1.0}) == before
    assert recipe(group_size=4) != before and recipe(sampling={"temperature": 0.7}) != before


def test_the_longest_rollout_is_that_of_any_environment():
    slow = LARGE | {"sampling": {"timeout": 900.0}}
    assert longest_rollout(Stack.model_validate(STACK)) == 20.0
    assert longest_rollout(Stack.model_validate(STACK | {"environments": [SMALL, slow]})) == 900.0
    held_out = {"environments": [{"name": "held", "type": "reverse_text", "sampling": {"timeout": 70.0}}]}
    assert longest_rollout(Stack.model_validate(STACK | {"evaluate": held_out})) == 70.0
