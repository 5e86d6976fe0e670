"""What `stackrl show` and forks write of a stack is the same stack again."""

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.stack import Stack
from stackrl.schemas.written import written


@pytest.mark.parametrize("file", stacks.STACKS, ids=lambda file: file.stem)
def test_every_stack_is_itself_again(file):
    stack = load(file).stack
    assert Stack.model_validate(written(stack)) == stack


def test_null_is_written_where_it_says_something(tmp_path):
    changes = ["monitors.rollouts=null", "guards.no_signal.unless_solved=null"]
    stack = load(stacks.write(tmp_path), changes).stack
    plain = written(stack)
    assert plain["monitors"] == {"rollouts": None}
    assert plain["guards"]["no_signal"]["unless_solved"] is None
    assert "evaluate" not in plain and "optimizer" not in plain["stages"][1]
    assert Stack.model_validate(plain) == stack


def test_null_that_a_stage_says_is_written(tmp_path):
    changes = ["algorithm.shaping={overlong: {limit: 9, buffer: 8}}", "stages.1.algorithm={shaping: null}"]
    file = stacks.write(tmp_path)
    stack = load(file, changes).stack
    assert stack.stages[1].algorithm.says("shaping")
    again = Stack.model_validate(written(stack))
    assert again == stack
    assert again.stages[1].algorithm.says("shaping")
