"""--set: typed as YAML, checked like the file, named in errors."""

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError


def loaded(folder, *overrides):
    return load(stacks.write(folder), overrides).stack


def complaint(folder, *overrides):
    with pytest.raises(StackError) as error:
        load(stacks.write(folder), overrides)
    return [str(problem) for problem in error.value.problems]


def test_values_keep_their_types(tmp_path):
    stack = loaded(
        tmp_path,
        "algorithm.loss.ratio_cap=3",
        "trainer.optimizer.learning_rate=1e-5",
        "algorithm.advantage.divide_by_deviation=true",
        "environments.0.args={letters: [2, 4]}",
        "weights.transport=folder",
    )
    assert stack.algorithm.loss.ratio_cap == 3
    assert stack.trainer.optimizer.learning_rate == 1e-5
    assert stack.algorithm.advantage.divide_by_deviation is True
    assert stack.environments[0].args == {"letters": [2, 4]}
    assert stack.weights.transport == "folder"


def test_entries_of_lists_by_name_or_position(tmp_path):
    stack = loaded(tmp_path, "stages.main.steps=7", "stages.0.steps=11", "environments.reverse.weight=2")
    assert [stage.steps for stage in stack.stages] == [11, 7]
    assert stack.environments[0].weight == 2


def test_the_later_one_wins(tmp_path):
    assert loaded(tmp_path, "seed=1", "seed=2").seed == 2


def test_a_shared_anchor_is_changed_in_one_place_only(tmp_path):
    base = stacks.GOOD.replace(
        "steps: 20, clean_steps: 10}", "steps: 20, optimizer: &rate {learning_rate: 0.1}}"
    )
    base = base.replace("type: rl, steps: 5}", "type: rl, steps: 5, optimizer: *rate}")
    stack = load(stacks.write(tmp_path, base=base), ["stages.main.optimizer.learning_rate=0.5"]).stack
    assert [stage.optimizer.learning_rate for stage in stack.stages] == [0.1, 0.5]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "algorithm.group_siz=4",
            "--set algorithm.group_siz: there is no such key; did you mean group_size?",
        ),
        ("algorithm.group_size=x", "--set algorithm.group_size: must be a whole number, is the text 'x'"),
        ("algorithm.group_size=", "--set algorithm.group_size: must be a whole number, is nothing; leave"),
        ("algorithm.group_size", "--set algorithm.group_size: is not KEY=VALUE; for example"),
        ("=4", "--set =4: is not KEY=VALUE"),
        ("a..b=4", "--set a..b=4: is not KEY=VALUE"),
        (
            "stages.nobody.steps=1",
            "--set stages.nobody.steps: the list has no entry nobody: it has 2 (warmup, main)",
        ),
        ("stages.9.steps=1", "--set stages.9.steps: the list has no entry 9"),
        ("seed.deep=1", "--set seed.deep: seed: must be a whole number, is a mapping of keys"),
        ("version.deep=1", "--set version.deep: version is 1 and has no key deep"),
        ("seed=2026-01-01", "--set seed: YAML reads this as a date"),
        ("seed=[1", "--set seed: the value is not YAML"),
        (
            "sampling={max_tokens: no}",
            "--set sampling: sampling.max_tokens: must be a whole number, is false",
        ),
        ("roles.trainer.processes=0", "--set roles.trainer.processes: must be at least 1, is 0"),
        (
            "algorithm.batch_size=12",
            "--set algorithm.batch_size: 12 rollouts are not whole groups of 8; make it 8 or 16",
        ),
    ],
)
def test_errors_name_the_option(tmp_path, override, expected):
    assert any(problem.startswith(expected) for problem in complaint(tmp_path, override)), complaint(
        tmp_path, override
    )
