"""Advantages by hand, and the cases in which they must be exactly zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackrl.runtime.orchestrator.advantages import ADVANTAGES, advantages, has_signal
from stackrl.schemas.algorithm import GrpoAdvantage

PLAIN, DIVIDED = GrpoAdvantage(), GrpoAdvantage(divide_by_deviation=True)


def test_by_hand():
    assert advantages([1.0, 0.0, 0.5, 0.5], PLAIN) == [0.5, -0.5, 0.0, 0.0]
    deviation = (0.5 / 3) ** 0.5  # of a sample: over n - 1
    assert advantages([1.0, 0.0, 0.5, 0.5], DIVIDED) == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, 0, 0], rel=1e-5
    )


@given(st.floats(-10, 10), st.integers(2, 16))
def test_equal_rewards_teach_nothing(reward, size):
    """Also where the mean of equal numbers is rounded to another number."""
    assert not has_signal([reward] * size)
    for settings in (PLAIN, DIVIDED):
        assert advantages([reward] * size, settings) == [0.0] * size


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_a_group_is_centred(rewards):
    assert sum(advantages(rewards, PLAIN)) == pytest.approx(0, abs=1e-9)


def test_each_type_of_the_language_is_registered():
    assert set(ADVANTAGES) == {GrpoAdvantage().type}
