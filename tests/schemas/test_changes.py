"""What a stage changes: a null that is written takes something away, and nothing else does."""

from __future__ import annotations

import json

import pytest
from small_runs import STACK

from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import AlgorithmChange

BASE = {
    "shaping": {"length": {"turns": 0.5}},
    "curriculum": {"floor": 0.2},
    "reference": {"endpoint": "http://a:1", "model": "m"},
    "loss": {"type": "grpo", "kl": {}},
}


def changed(**algorithm):
    """A stack of two stages, the second with changes; each time as it is, and as a run's folder keeps it."""
    stages = [
        {"name": "one", "type": "rl", "steps": 2},
        {"name": "two", "type": "rl", "steps": 2, "algorithm": algorithm},
    ]
    stack = Stack.model_validate(STACK | {"algorithm": STACK["algorithm"] | BASE, "stages": stages})
    kept = Stack.model_validate(json.loads(stack.model_dump_json()))
    assert kept == stack
    for each in (stack, kept):
        before, after = (settings_of(each, stage).algorithm for stage in each.stages)
        assert before.shaping and before.curriculum and before.reference
        yield before, after


@pytest.mark.parametrize("key", ["shaping", "curriculum", "reference"])
def test_null_takes_away_what_may_be_missing_and_leaves_the_rest(key):
    for before, after in changed(**{key: None}, batch_size=32):
        assert getattr(after, key) is None
        assert after == before.model_copy(update={key: None, "batch_size": 32})


def test_what_is_left_out_stays():
    for before, after in changed(batch_size=32):
        assert after == before.model_copy(update={"batch_size": 32})


def test_null_for_what_cannot_be_missing_changes_nothing():
    for before, after in changed(group_size=None, loss=None, no_signal=None):
        assert after == before


def test_a_section_that_is_given_is_the_whole_section():
    for _, after in changed(shaping={"overlong": {"limit": 9, "buffer": 3}}, distillation={"limit": 0.1}):
        assert after.shaping.length is None and after.shaping.overlong.limit == 9
        assert after.distillation.squared_log_ratio == 1e-3


def test_null_within_what_is_given_is_kept():
    arguments = {"x": None, "y": {"z": None}}
    for _, after in changed(loss={"type": "python", "path": "a:b", "arguments": arguments}):
        assert after.loss.arguments == arguments


def test_a_change_knows_what_it_says():
    change = AlgorithmChange.model_validate({"shaping": None, "group_size": None, "batch_size": 4})
    assert [key for key in AlgorithmChange.model_fields if change.says(key)] == ["shaping", "batch_size"]
