"""Means over prompts, pass@k and their intervals, against counting and against what is known of them."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackrl.runtime.orchestrator.scores import Answered, Estimate, pass_at, scores, tries


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_hold_a_solution(solved, data):
    k = data.draw(st.integers(1, len(solved)))
    choices = list(combinations(solved, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, len(solved), sum(solved)) == pytest.approx(expected, abs=1e-12)


def test_which_k_are_told():
    assert [tries(samples) for samples in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_wilsons_interval_of_ones_and_zeros():
    """Figures of Wilson's interval for 81 of 263, worked out from its formula with mpmath."""
    estimate = Estimate.of([1.0] * 81 + [0.0] * 182)
    assert estimate.mean == pytest.approx(81 / 263)
    assert (estimate.low, estimate.high) == pytest.approx((0.25528, 0.36623), abs=1e-4)
    never = Estimate.of([0.0] * 256)
    assert (never.mean, never.low) == (0.0, 0.0) and 0.01 < never.high < 0.02, "256 failures do not prove 0"


def test_the_bootstraps_interval_is_that_of_the_mean():
    rng = Random(1)
    values = [rng.uniform(-1, 3) for _ in range(400)]
    estimate = Estimate.of(values)
    deviation = (sum((v - fmean(values)) ** 2 for v in values) / 399) ** 0.5
    assert estimate.mean == pytest.approx(fmean(values))
    for end, sign in ((estimate.low, -1), (estimate.high, 1)):
        assert end == pytest.approx(estimate.mean + sign * 1.96 * deviation / 20, abs=0.015)
    assert estimate == Estimate.of(values), "the same numbers give the same interval"


def test_intervals_cover_what_is_true_about_as_often_as_they_say():
    rng, covered = Random(2), 0
    for _ in range(200):
        rates = [rng.betavariate(1, 2) for _ in range(80)]  # mean 1/3
        values = [fmean(rng.random() < rate for _ in range(4)) for rate in rates]
        estimate = Estimate.of(values)
        covered += estimate.low <= 1 / 3 <= estimate.high
    assert 0.9 <= covered / 200 <= 0.99


def test_answers_to_one_prompt_count_as_one_trial():
    answers = [[Answered(float(solved), float(solved))] * 4 for solved in (1, 0, 1, 0)]
    found = scores(answers, 4)
    assert found["exact"] == found["pass@4"] == 0.5
    assert found["exact_high"] == Estimate.of([1.0, 0.0, 1.0, 0.0]).high


def test_failed_answers_are_no_wrong_ones():
    solved, failed_twice, nothing = [Answered(1.0, 1.0)] * 4, [Answered(0.5, 0.0)] * 2, []
    found = scores([solved, failed_twice, nothing], 4)
    assert found["reward"] == 0.75 and found["exact"] == 0.5
    assert found["pass@2"] == 0.5 and found["pass@4"] == 1.0, "two answers say nothing about four"


def test_one_answer_to_a_prompt_tells_of_no_further_tries():
    assert set(scores([[Answered(0.3, 0.0)], [Answered(0.4, 1.0)]], 1)) == {
        f"{name}{end}" for name in ("reward", "exact") for end in ("", "_low", "_high")
    }
