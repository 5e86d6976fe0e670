"""Runs that go on with another stack: what was made from other prompts is not trained beside new ones."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, begin_attempt, chat, make_run, reversed_badly
from whole_runs import algorithm, documents, events_of, first_checkpoint_of, run_all, stopped_when

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.audit import audit
from stackrl.runtime.orchestrator.recipes import recipes
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.schemas.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
LONGER = [{"name": "reverse", "type": "reverse_text", "args": {"letters": [7, 8]}}]


async def half_done(folder):
    """A run that was ended beyond its first checkpoint, at whose cut groups were open; how many rollouts."""
    run = make_run(folder)
    run.write("plan.json", {"processes": []})
    with FakeTrainer(run, TOKEN, stop_at=5) as trainer:
        await stopped_when(first_checkpoint_of(run, trainer, 5), run)
    cut = checkpoints.folder(run.checkpoints(run.stack()), 3) / "orchestrator" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(cut)) as db:
        [(open_rollouts,)] = db.execute(
            "SELECT COUNT(*) FROM rollouts WHERE state IN ('planned', 'finished', 'batched')"
        )
    assert open_rollouts, "this test needs open groups"
    return run, open_rollouts


async def gone_on(run, **changes):
    """Let the run go on with a changed stack; its trainer."""
    run.write("stack.json", Stack.model_validate(STACK | changes).model_dump(mode="json"))
    begin_attempt(run)
    trainer = FakeTrainer(run, TOKEN)
    await run_all(run, trainer, FakeEngine(reversed_badly))
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        {"environments": LONGER},
        {"environments": [STACK["environments"][0], {"name": "swap", "type": "swap_words"}]},
        {"algorithm": algorithm(group_size=8)},
        {"sampling": STACK["sampling"] | {"temperature": 0.5}},
    ],
    ids=["arguments", "mix", "group size", "sampling"],
)
async def test_open_groups_of_another_recipe_are_dropped_and_the_audit_says_so(tmp_path, changes):
    run, open_rollouts = await half_done(tmp_path)
    trainer = await gone_on(run, **changes)
    audited = audit(run)
    assert audited.clean and audited.steps.all == 8, str(audited)
    assert audited.rollouts.dropped == {"changed": open_rollouts}
    assert f"changed {open_rollouts}" in str(audited)
    [event] = events_of(run, "open_groups_dropped")
    assert (event["stage"], event["rollouts"]) == ("main", open_rollouts)
    stack = run.stack()
    mix = Mix(stack.environments, Seeds(stack.seed).branch("rl", "main"))
    new = {tuple(chat().prompt(mix.draw(number).task.messages)) for number in range(60)}
    trained = {document[0] for index in range(3, 8) for document in documents(trainer.batches[index])}
    assert trained <= new, "a prompt of before was trained"


async def test_what_only_says_how_batches_are_trained_drops_nothing(tmp_path):
    run, _ = await half_done(tmp_path)
    optimizer = {"optimizer": {"learning_rate": 1e-5}}
    await gone_on(
        run,
        trainer=STACK["trainer"] | optimizer,
        algorithm=algorithm(loss={"type": "grpo"}),
        sampling=STACK["sampling"] | {"timeout": 30.0},
        checkpoint={"every": 2},
    )
    assert audit(run).clean and audit(run).rollouts.dropped == {}
    assert not events_of(run, "open_groups_dropped")


def test_a_recipe_is_of_its_stage():
    def of(**changes):
        return recipes(Stack.model_validate(STACK | changes))

    more = [*STACK["stages"], {"name": "more", "type": "rl", "steps": 2}]
    changed = [*more[:2], more[2] | {"environments": LONGER}]
    assert of(stages=more)["main"] == of(stages=changed)["main"] == of()["main"]
    assert of(stages=more)["more"] != of(stages=changed)["more"]
    assert of(seed=4)["main"] != of()["main"]
    assert of(trainer={"sequence_length": 64})["main"] != of()["main"], "what is longer could not be trained"
