"""Steps of stages with data are counted when a run is made, and stay what they are."""

from __future__ import annotations

import json

import pytest

import stacks
from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.epochs import as_asked
from stackrl.runtime.launch.planning.plan import Machine, make_plan
from stackrl.runtime.launch.planning.plan_table import table
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

ALONE = (
    ("      inference: {processes: 1}\n", ""),
    ("    environments:\n      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}\n", ""),
    ("      - {name: main, type: rl, steps: 5}\n", ""),
)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A stack with one supervised stage, beside a file of 100 rows, as seen from its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n\n")
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.writelines(['{"prompt": "a", "completion": "b"}\n'] * 99)
    return lambda stage: load(stacks.write(tmp_path, *ALONE, ("steps: 20, clean_steps: 10", stage)))


@pytest.mark.parametrize(
    ("stage", "epochs", "steps"),
    [
        ("data: {path: rows.jsonl}", 1.0, 2),
        ("batch_size: 10, epochs: 2.5, data: {path: rows.jsonl}", 2.5, 25),
        ("batch_size: 10, data: {path: rows.jsonl, limit: 31}", 1.0, 4),
        ("batch_size: 10, data: {path: rows.jsonl}, validation: {share: 0.2}", 1.0, 8),
        ("batch_size: 10, data: {path: rows.jsonl}, validation: {path: ., limit: 3}", 1.0, 10),
        ("batch_size: 10, data: {path: [rows.jsonl, '*.jsonl']}", 1.0, 20),
        ("steps: 7, data: {path: rows.jsonl}", None, 7),
    ],
)
def test_steps_are_counted_in_the_rows(loaded, tmp_path, stage, epochs, steps):
    asked = loaded(stage)
    stack, _ = admit(asked)
    [counted] = stack.stages
    assert (counted.epochs, counted.steps) == (epochs, steps)
    paths = counted.data.path if isinstance(counted.data.path, list) else [counted.data.path]
    assert all(path.startswith(str(tmp_path)) for path in paths), "found wherever the run goes on"
    again = as_asked(stack).stages[0]
    assert again.steps == asked.stack.stages[0].steps


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("data: {path: other.jsonl}", "small.yaml:19:55: stages.0.data.path: no file or folder is called"),
        (
            "data: {path: rows.jsonl}, validation: {path: other.jsonl}",
            "stages.0.validation.path: no file or folder is called",
        ),
        ("data: {path: empty.jsonl}", "stages.0.data.path: the files hold no rows"),
        (
            "data: {path: rows.jsonl}, optimizer: {warmup_steps: 3}",
            "warmup_steps: 3 warmup steps, but stage warmup has 2 steps",
        ),
    ],
)
def test_what_cannot_be_counted_is_told_where_it_stands(loaded, tmp_path, stage, said):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(StackError) as error:
        admit(loaded(stage))
    assert said in str(error.value)


def test_the_plan_of_a_trainer_alone(loaded):
    plan = make_plan(asked := loaded("epochs: 2, data: {path: rows.jsonl}"), Machine(cores=(0, 1)))
    assert [(process.name, tuple(process.ports)) for process in plan.processes] == [
        ("trainer-0", ("rendezvous",)),
        ("orchestrator", ("batches",)),
    ]
    text = table(plan, asked.stack)
    assert "engines   none: nothing is sampled" in text
    assert "stage     warmup: supervised, 2 epochs in steps of 64 rows, from rows.jsonl" in text
