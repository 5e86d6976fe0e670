"""Shaped rewards against each formula, written again in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.shaping import divergence, overlong, shaped
from stackrl.runtime.transport.messages import Sample, Span, Version
from stackrl.schemas.advantages import DivergencePenalty, LengthPenalty, Overlong, Shaping


def sample(sampled: list[float], read: int = 3, reference: list[float] | None = None) -> Sample:
    """``sampled`` are the engine's logprobs, ``reference`` those of the reference."""
    length = read + len(sampled)
    told = None if reference is None else np.array([math.nan] * read + reference, dtype="<f4")
    return Sample(
        rollout="0-0",
        group=0,
        environment="words",
        tokens=np.arange(length, dtype="<i4"),
        loss_mask=np.array([0] * read + [1] * len(sampled), dtype="|u1"),
        logprobs=np.array([0.0] * read + sampled, dtype="<f4"),
        spans=[Span(read, length, Version(1, 0))],
        reference=told,
    )


def rollout(reward: float, samples: list[Sample], turns: int = 1) -> Rollout:
    return Rollout(
        group=0,
        number=0,
        environment="words",
        reward=reward,
        metrics={},
        turns=turns,
        sampled=sum(int(s.loss_mask.sum()) for s in samples),
        prefix_breaks=0,
        samples=samples,
    )


def test_nothing_is_changed_where_nothing_is_said():
    rollouts = [rollout(0.25, [sample([-1.0])]), rollout(-3.0, [sample([-1.0])])]
    for shaping in (None, Shaping()):
        assert shaped(rollouts, shaping).tolist() == [0.25, -3.0]


def test_a_length_penalty_by_hand():
    """reward − mean · (0.25 · out/max out + 0.1 · in/max in + 0.1 · turns/max turns)."""
    rollouts = [
        rollout(1.0, [sample([-1.0] * 4, read=10)], turns=1),
        rollout(0.5, [sample([-1.0] * 6, read=10), sample([-1.0] * 2, read=30)], turns=2),
    ]
    expected = [
        1.0 - 0.75 * (0.25 * 4 / 8 + 0.1 * 10 / 40 + 0.1 * 1 / 2),
        0.5 - 0.75 * (0.25 + 0.1 + 0.1),
    ]
    assert shaped(rollouts, Shaping(length=LengthPenalty())) == pytest.approx(expected)
    only_turns = LengthPenalty(sampled=0.0, read=0.0, turns=1.0)
    assert shaped(rollouts, Shaping(length=only_turns)) == pytest.approx([1.0 - 0.375, 0.5 - 0.75])


def test_being_long_is_no_merit_where_rewards_are_negative():
    rollouts = [rollout(-1.0, [sample([-1.0])]), rollout(-1.0, [sample([-1.0] * 9)])]
    assert shaped(rollouts, Shaping(length=LengthPenalty())).tolist() == [-1.0, -1.0]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 20))
def test_overlong(length, buffer, free):
    """DAPO, equation 13: 0 up to limit − buffer, ((limit − buffer) − length) / buffer, then −1."""
    limit = free + buffer
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer
    else:
        expected = -1.0
    assert overlong(length, Overlong(limit=limit, buffer=buffer)) == pytest.approx(expected)
    assert overlong(length, Overlong(limit=limit, buffer=buffer, penalty=0.5)) == pytest.approx(expected / 2)


def test_overlong_in_a_group():
    rollouts = [rollout(1.0, [sample([-1.0] * length)]) for length in (4, 6, 8, 20)]
    settings = Shaping(overlong=Overlong(limit=8, buffer=4))
    assert shaped(rollouts, settings).tolist() == [1.0, 0.5, 0.0, 0.0]


def k3(d: float) -> float:
    """As its formula, down to where its slope is −20."""
    steepest = -math.log(21)
    if d >= steepest:
        return math.exp(-d) + d - 1
    return 20 + steepest - 20 * (d - steepest)


ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": k3}
LOGPROBS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=6)


@given(LOGPROBS, LOGPROBS, st.sampled_from(sorted(ESTIMATORS)))
def test_a_divergence_is_summed_over_the_sampled_tokens_alone(first, second, estimator):
    """What is not sampled has NaN in the reference here, and a logprob that means nothing."""
    samples = [sample([m for m, _ in part], reference=[r for _, r in part]) for part in (first, second)]
    expected = sum(
        ESTIMATORS[estimator](float(np.float32(m)) - float(np.float32(r))) for m, r in [*first, *second]
    )
    settings = DivergencePenalty(weight=0.5, estimator=estimator)
    assert divergence(rollout(1.0, samples), settings) == pytest.approx(0.5 * expected, rel=1e-6, abs=1e-6)
    [found] = shaped([rollout(1.0, samples)], Shaping(divergence=settings))
    assert found == pytest.approx(1.0 - 0.5 * expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize("far", [-50.0, 50.0, -1000.0])
def test_a_token_that_is_far_out_does_not_decide_alone(estimator, far):
    one = sample([min(far, 0.0)], reference=[min(-far, 0.0)])
    cost = divergence(rollout(1.0, [one]), DivergencePenalty(weight=1.0, estimator=estimator))
    assert cost == pytest.approx(ESTIMATORS[estimator](math.copysign(20.0, far)))
    assert abs(cost) <= 400


def test_a_divergence_without_a_reference_is_an_error():
    with pytest.raises(ValueError, match="0-0 has no logprobs of a reference"):
        shaped([rollout(1.0, [sample([-1.0])])], Shaping(divergence=DivergencePenalty(weight=1.0)))
