"""Stages that learn from files, and runs without engines: what fits together, and what is told."""

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

ALONE = (
    ("      inference: {processes: 1}\n", ""),
    ("    environments:\n      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}\n", ""),
    ("      - {name: main, type: rl, steps: 5}\n", ""),
)
"""Changes that leave a supervised stage alone."""
STAGE = "steps: 20, clean_steps: 10"


@pytest.mark.parametrize(
    "stage",
    [
        "data: {path: chats.jsonl}",
        "data: {path: [a.jsonl, b/*.parquet], learn: [assistant, tool], limit: 9, too_long: drop}, epochs: 3",
        "steps: 9, data: {path: chats.jsonl}, validation: {share: 0.1, every: 2}",
        "epochs: 0.5, data: {path: chats.jsonl, rewritten: split}, validation: {path: out.jsonl, limit: 8}",
    ],
)
def test_a_trainer_with_data_is_a_whole_stack(tmp_path, stage):
    """Its sequences may be shorter than what engines would write."""
    short = ("    sampling:", "    trainer: {sequence_length: 64}\n    sampling:")
    loaded = load(stacks.write(tmp_path, *ALONE, short, (STAGE, stage)))
    assert loaded.stack.environments == [] and loaded.stack.stages[0].data is not None


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("steps: 2, epochs: 2, data: {path: a.jsonl}", "epochs: steps are given too; remove one of the two"),
        ("epochs: 2", "epochs: environments draw demonstrations without end"),
        ("batch_size: 2", "stages.0: a stage without data needs a number of steps; say steps: 100"),
        ("data: {path: a.jsonl}, clean_steps: 3", "clean_steps: this key is for the demonstrations"),
        (
            "data: {path: a.jsonl}, environments: [{name: a, type: reverse_text}]",
            "environments: this key is for the demonstrations of environments",
        ),
        ("steps: 2, validation: {share: 0.1}", "validation: only stages with data have held-out rows"),
        (
            "data: {path: a.jsonl}, validation: {every: 2}",
            "validation: it says nothing of its rows; give exactly",
        ),
        (
            "data: {path: a.jsonl}, validation: {path: b.jsonl, share: 0.1}",
            "validation: both path and share are given; give exactly one",
        ),
        ("data: {path: []}", "data.path"),
        ("data: {path: a.jsonl, learn: []}", "data.learn"),
        ("data: {path: a.jsonl}, validation: {share: 1.0}", "validation.share"),
    ],
)
def test_what_does_not_fit_is_told_with_a_mend(tmp_path, stage, said):
    with pytest.raises(StackError) as error:
        load(stacks.write(tmp_path, (STAGE, stage)))
    [problem] = error.value.problems
    assert said in str(problem)


def test_engines_and_environments_are_needed_where_something_samples(tmp_path):
    data = (STAGE, "data: {path: a.jsonl}")
    with pytest.raises(StackError) as error:
        load(stacks.write(tmp_path, *ALONE[:2], data))
    engines, environments = error.value.problems
    assert "roles: there are no engines; give `inference`" in str(engines)
    assert "stages.1: stage main has no environments to learn from" in str(environments)


def test_evaluations_need_a_stage_that_samples(tmp_path):
    evaluate = (
        "    sampling:",
        "    evaluate: {every: 1, environments: [{name: r, type: reverse_text}]}\n    sampling:",
    )
    with pytest.raises(StackError, match="evaluate: environments are evaluated during rl stages"):
        load(stacks.write(tmp_path, *ALONE, (STAGE, "data: {path: a.jsonl}"), evaluate))
