"""Advantages against a second, plain implementation of each formula, and what must be exactly zero."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackrl.runtime.orchestrator import advantages as module
from stackrl.runtime.orchestrator.advantages import (
    IN_GROUP,
    OVERALL,
    Rewarded,
    advantages,
)
from stackrl.runtime.orchestrator.errors import BadInput
from stackrl.runtime.orchestrator.groups import Rollout, has_signal
from stackrl.schemas.advantages import (
    Advantage,
    GrpoAdvantage,
    HierarchicalAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    PythonAdvantage,
    RaeAdvantage,
    ReinforcePlusPlusAdvantage,
    compares,
)

PLAIN, DIVIDED = GrpoAdvantage(), GrpoAdvantage(divide_by_deviation=True)
LEAVE_ONE_OUT, MAX_RL = LeaveOneOutAdvantage(type="leave_one_out"), MaxRlAdvantage(type="max_rl")
WHITENED = ReinforcePlusPlusAdvantage(type="reinforce_plus_plus")
WHITENED_IN_GROUPS = ReinforcePlusPlusAdvantage(type="reinforce_plus_plus", baseline="group")
RAE = RaeAdvantage(type="rae", decay=0.75)
HIERARCHICAL = HierarchicalAdvantage(type="hierarchical", within_episode=[1])
COMPARING = [PLAIN, DIVIDED, LEAVE_ONE_OUT, MAX_RL, HIERARCHICAL, WHITENED_IN_GROUPS]
REWARDS = st.floats(-5, 5).map(lambda reward: round(reward, 3))
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=9), min_size=1, max_size=5)
"""Of several sizes: some of their rollouts have failed."""
several = settings(max_examples=30)


def rollout(group: int, number: int, reward: float, **metrics: float) -> Rollout:
    return Rollout(
        group=group,
        number=number,
        environment="words",
        reward=reward,
        metrics=metrics,
        turns=1,
        sampled=1,
        prefix_breaks=0,
        samples=[],
    )


def rewarded(*groups: list[float], metrics: list[dict[str, float]] | None = None) -> list[Rewarded]:
    return [
        Rewarded(
            [rollout(g, n, r, **(metrics[n] if metrics else {})) for n, r in enumerate(rewards)],
            np.array(rewards, dtype=np.float64),
        )
        for g, rewards in enumerate(groups)
    ]


def of(settings: Advantage, *groups: list[float], **options) -> list[list[float]]:
    return [values.tolist() for values in advantages(rewarded(*groups, **options), settings)]


def exactly(numbers: list[float]) -> list[Fraction]:
    return [Fraction(number) for number in numbers]


def mean(numbers: list[Fraction]) -> Fraction:
    return sum(numbers, Fraction(0)) / len(numbers)


def deviation(numbers: list[Fraction], freedom: int) -> float:
    centre = mean(numbers)
    return math.sqrt(sum((number - centre) ** 2 for number in numbers) / (len(numbers) - freedom))


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx([float(value) for value in other], rel=1e-9, abs=1e-9)


def test_by_hand():
    assert of(PLAIN, [1.0, 0.0, 0.5, 0.5]) == [[0.5, -0.5, 0.0, 0.0]]
    spread = (0.5 / 3) ** 0.5  # of a sample: over n - 1
    [found] = of(DIVIDED, [1.0, 0.0, 0.5, 0.5])
    assert found == pytest.approx([0.5 / spread, -0.5 / spread, 0, 0], rel=1e-5)
    close(of(LEAVE_ONE_OUT, [1.0, 0.0, 0.0]), [[1.0, -0.5, -0.5]])
    close(of(MAX_RL, [1.0, 0.0, 0.0, 0.0]), [[3.0, -1.0, -1.0, -1.0]])


@several
@given(GROUPS)
def test_grpo(groups):
    close(of(PLAIN, *groups), [[r - mean(exactly(g)) for r in exactly(g)] for g in groups])


@several
@given(GROUPS)
def test_grpo_over_the_deviation(groups):
    expected = []
    for group in map(exactly, groups):
        spread = deviation(group, 1) + 1e-6
        expected.append([float(r - mean(group)) / spread for r in group])
    close(of(DIVIDED, *groups), expected)


@several
@given(GROUPS)
def test_leave_one_out_compares_with_the_others_alone(groups):
    expected = [
        [r - mean(group[:place] + group[place + 1 :]) for place, r in enumerate(group)]
        for group in map(exactly, groups)
    ]
    close(of(LEAVE_ONE_OUT, *groups), expected)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=9), min_size=1, max_size=4))
def test_max_rl(groups):
    expected = [
        [(r - mean(group)) / mean(group) if mean(group) > 0 else 0 for r in group]
        for group in map(exactly, groups)
    ]
    close(of(MAX_RL, *groups), expected)


def test_max_rl_of_a_mean_below_zero_teaches_nothing():
    assert of(MAX_RL, [-1.0, 0.5], [-1.0, 1.0]) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("noise", [[0.1, 0.2, -0.3, 0.0], [0.3, -0.1, -0.2], [1e9, 1e-3, -1e9]])
def test_max_rl_of_rewards_that_cancel_each_other_out_teaches_nothing(noise):
    """Their mean is what rounding leaves of it, which is no measure."""
    assert of(MAX_RL, noise, [-r for r in noise]) == [[0.0] * len(noise)] * 2


@several
@given(GROUPS)
def test_reinforce_plus_plus_whitens_the_batch(groups):
    everything = [r for group in groups for r in exactly(group)]
    spread = deviation(everything, 0) + 1e-6
    expected = [[float(r - mean(everything)) / spread for r in exactly(group)] for group in groups]
    close(of(WHITENED, *groups), expected)


@several
@given(GROUPS)
def test_reinforce_plus_plus_with_the_groups_means(groups):
    centred = [[r - mean(group) for r in group] for group in map(exactly, groups)]
    spread = deviation([value for group in centred for value in group], 0) + 1e-6
    close(of(WHITENED_IN_GROUPS, *groups), [[float(value) / spread for value in group] for group in centred])


@several
@given(GROUPS, st.floats(-1, 1))
def test_rae_moves_one_mean_from_rollout_to_rollout(groups, before):
    baselines, baseline, expected = {"words": before, "other": 0.5}, Fraction(before), []
    for group in map(exactly, groups):
        expected.append([])
        for reward in group:
            expected[-1].append(reward - baseline)
            baseline = baseline * 3 / 4 + reward / 4
    close([v.tolist() for v in advantages(rewarded(*groups), RAE, baselines)], expected)
    assert baselines == {"words": pytest.approx(float(baseline)), "other": 0.5}


def test_rae_has_a_mean_for_each_agent():
    baselines: dict[str, float] = {}
    agents = [{"agent": 0.0}, {"agent": 1.0}, {"agent": 0.0}]
    [found] = advantages(rewarded([1.0, -1.0, 1.0], metrics=agents), RAE, baselines)
    assert found.tolist() == [1.0, -1.0, 0.75]
    assert baselines == {"words/0": pytest.approx(0.4375), "words/1": pytest.approx(-0.25)}


def test_hierarchical_compares_an_agent_with_itself():
    metrics = [
        {"agent": 0, "episode": 0}, {"agent": 1, "episode": 0}, {"agent": 1, "episode": 0},
        {"agent": 0, "episode": 1}, {"agent": 1, "episode": 1}, {"agent": 1, "episode": 1},
        {"agent": 2, "episode": 1},
    ]  # fmt: skip
    [found] = of(HIERARCHICAL, [1.0, 0.0, 1.0, 0.0, 3.0, 5.0, 9.0], metrics=metrics)
    assert found == [0.5, -0.5, 0.5, -0.5, -1.0, 1.0, 0.0]


def test_hierarchical_without_agents_is_grpo():
    assert of(HIERARCHICAL, [1.0, 0.0, 0.5]) == of(PLAIN, [1.0, 0.0, 0.5])


@given(st.floats(-10, 10), st.lists(st.integers(2, 16), min_size=1, max_size=3))
def test_equal_rewards_teach_nothing(reward, sizes):
    """Also where the mean of equal numbers is rounded to another number."""
    groups = [[reward] * size for size in sizes]
    assert not any(map(has_signal, groups))
    for kind in [*COMPARING, WHITENED]:
        assert of(kind, *groups) == [[0.0] * size for size in sizes]


@given(st.floats(-10, 10), st.integers(2, 16))
def test_a_group_without_signal_stays_at_zero_beside_one_that_has_it(reward, size):
    for kind in COMPARING:
        found = of(kind, [reward] * size, [0.0, 1.0, 1.0])
        assert found[0] == [0.0] * size, kind
        assert any(found[1])


@several
@given(GROUPS, st.integers(0, 4))
def test_no_group_looks_at_another_ones_rewards(groups, place):
    """As it would where groups of several sizes were cut out of one array by position."""
    place %= len(groups)
    for kind in [PLAIN, DIVIDED, LEAVE_ONE_OUT, MAX_RL, HIERARCHICAL]:
        assert of(kind, *groups)[place] == of(kind, groups[place])[0]


def test_who_is_left_alone_is_compared_with_nobody():
    for kind in COMPARING:
        assert of(kind, [3.0]) == [[0.0]]
        assert compares(kind)
    for kind in (WHITENED, RAE):
        assert not compares(kind)
    assert of(RAE, [3.0]) == [[3.0]]
    assert of(WHITENED, [3.0], [1.0]) == [[pytest.approx(1.0, rel=1e-5)], [pytest.approx(-1.0, rel=1e-5)]]


def test_no_groups():
    for kind in [*COMPARING, WHITENED, RAE]:
        assert advantages([], kind) == []


OWN = """
import numpy as np

def ranked(rewards, rollouts, *, scale):
    assert [r.reward for r in rollouts] == rewards.tolist()
    return scale * np.argsort(np.argsort(rewards))

def short(rewards, rollouts):
    return rewards[1:]

def sorting(rewards, rollouts):
    rollouts.sort(key=lambda rollout: -rollout.reward)
    return rewards

def sorted_copy(rewards, rollouts):
    best = sorted(rollouts, key=lambda rollout: -rollout.reward)[0]
    return [float(rollout is best) for rollout in rollouts]

def leaving(rewards, rollouts):
    raise SystemExit(0)

def endless(rewards, rollouts):
    return rewards / 0.0 * 0

def broken(rewards, rollouts):
    return rollouts[17]

nothing = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name, **arguments: PythonAdvantage(
        type="python", path=f"{tmp_path / 'own.py'}:{name}", arguments=arguments
    )


def test_an_advantage_of_the_user(own):
    assert of(own("ranked", scale=2), [0.5, 0.1, 0.9], [1.0, 0.0]) == [[2.0, 0.0, 4.0], [2.0, 0.0]]
    assert of(own("sorted_copy"), [0.5, 0.1, 0.9], [1.0, 0.0]) == [[0.0, 0.0, 1.0], [1.0, 0.0]]


def test_an_advantage_of_the_user_is_zero_where_rewards_are_equal(own):
    """A rank of equal numbers is their order, and nothing that one could learn from."""
    assert of(own("ranked", scale=2), [0.5] * 3, [0.0, 1.0]) == [[0.0] * 3, [0.0, 2.0]]
    assert not np.signbit(of(own("broken"), [1.0, 1.0])).any()


def test_an_advantage_of_the_user_cannot_change_the_order_of_rollouts(own):
    groups = rewarded([0.5, 0.1, 0.9])
    with pytest.raises(BadInput):
        advantages(groups, own("sorting"))
    assert [rollout.number for rollout in groups[0].rollouts] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("short", "must give one finite number for each"),
        ("endless", "must give one finite number for each"),
        ("broken", "failed: IndexError: tuple index out of range"),
        ("sorting", "AttributeError: 'tuple' object has no attribute 'sort'"),
        ("leaving", "failed: SystemExit"),
        ("missing", "has no missing"),
        ("nothing", "is int, not a function"),
    ],
)
def test_an_advantage_of_the_user_that_does_not_work(own, name, reason):
    with pytest.raises(BadInput) as caught:
        of(own(name), [1.0, 0.0])
    assert reason in str(caught.value) and "own.py" in str(caught.value)


def test_each_type_of_the_language_is_registered():
    types = {
        model.model_fields["type"].annotation.__args__[0]
        for model in vars(module).values()
        if isinstance(model, type) and model.__name__.endswith("Advantage")
    }
    assert types == {*IN_GROUP, *OVERALL} and len(types) == 7
