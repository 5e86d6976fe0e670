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
