"""From groups to what a batch teaches: components, advantages by environment, and what is remembered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import STACK

from stackrl.runtime.orchestrator import signals as module
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.curriculum import shares, solve_rates
from stackrl.runtime.orchestrator.errors import BadInput
from stackrl.runtime.orchestrator.groups import FinishedGroup, Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.signals import Signals, look_for_own_functions
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.transport.messages import CE, REF_KL, RL, Sample, Span, Version
from stackrl.schemas.advantages import Curriculum
from stackrl.schemas.stack import Stack, settings_of

EASY = {"name": "easy", "type": "reverse_text", "args": {"letters": [3, 3]}}
HARD = {"name": "hard", "type": "reverse_text", "args": {"letters": [6, 6]}}
RAE = {"type": "rae", "decay": 0.75}


def settings(*environments, **algorithm):
    stack = Stack.model_validate(
        STACK | {"environments": [*environments] or [EASY], "algorithm": STACK["algorithm"] | algorithm}
    )
    return settings_of(stack, stack.stages[-1])


def sample(group: int, number: int, environment: str) -> Sample:
    return Sample(
        rollout=f"{group}-{number}",
        group=group,
        environment=environment,
        tokens=np.arange(5, dtype="<i4"),
        loss_mask=np.array([0, 0, 1, 0, 1], dtype="|u1"),
        logprobs=np.array([0, 0, -1, 0, -1], dtype="<f4"),
        spans=[Span(2, 3, Version(1, 0)), Span(4, 5, Version(1, 0))],
    )


def group(number: int, rewards: list[float], environment: str = "easy", solved: float | None = None):
    rollouts = [
        Rollout(
            group=number,
            number=n,
            environment=environment,
            reward=reward,
            metrics={} if solved is None else {"solved": solved},
            turns=1,
            sampled=2,
            prefix_breaks=0,
            samples=[sample(number, n, environment)] * (1 + n % 2),
        )
        for n, reward in enumerate(rewards)
    ]
    return FinishedGroup(Plan(number, "main", number, environment, 0, len(rewards)), rollouts)


def advantages_of(samples):
    return [(each.rollout, each.advantage) for each in samples]


def test_every_sample_of_a_rollout_has_its_advantage():
    lesson = Signals(settings()).lesson([group(0, [1.0, 0.0, 0.0, 1.0])], {})
    assert advantages_of(lesson.samples) == [
        ("0-0", 0.5), ("0-1", -0.5), ("0-1", -0.5), ("0-2", -0.5), ("0-3", 0.5), ("0-3", 0.5),
    ]  # fmt: skip
    assert all(each.loss_mask.tolist() == [0, 0, RL, 0, RL] for each in lesson.samples)
    assert lesson.record == {"group_signal": 1.0}


@pytest.mark.parametrize(("component", "mark"), [("rl", RL), ("ce", CE), ("ref_kl", REF_KL)])
def test_tokens_are_marked_with_what_they_are_trained_by(component, mark):
    signals = Signals(settings(EASY | {"component": component}))
    lesson = signals.lesson([group(0, [1.0, 0.0])], {})
    assert all(each.loss_mask.tolist() == [0, 0, mark, 0, mark] for each in lesson.samples)
    assert any(advantage for _, advantage in advantages_of(lesson.samples)) is (component == "rl")


def test_an_environment_has_its_own_advantage():
    signals = Signals(settings(EASY, HARD | {"advantage": {"type": "max_rl"}}))
    lesson = signals.lesson([group(0, [1.0, 0.0]), group(1, [1.0, 0.0], "hard")], {})
    assert [advantage for _, advantage in advantages_of(lesson.samples)] == [0.5, -0.5, -0.5, 1.0, -1.0, -1.0]


def test_a_batch_is_whitened_over_all_that_share_the_advantage():
    whitened = {"type": "reinforce_plus_plus"}
    own = HARD | {"advantage": {"type": "grpo"}}
    signals = Signals(settings(EASY, own, EASY | {"name": "third"}, advantage=whitened))
    groups = [group(0, [1.0, 0.0]), group(1, [5.0, 3.0], "hard"), group(2, [0.0, 0.0, 0.0], "third")]
    values = dict(advantages_of(signals.lesson(groups, {}).samples))
    mean, deviation = 0.2, 0.4
    assert values["0-0"] == pytest.approx((1 - mean) / deviation, rel=1e-5)
    assert values["2-1"] == pytest.approx(-mean / deviation, rel=1e-5)
    assert (values["1-0"], values["1-1"]) == (1.0, -1.0)


def test_what_is_usable_and_what_teaches():
    compared, alone = Signals(settings()), Signals(settings(advantage=RAE))
    taught = Signals(settings(EASY | {"component": "ref_kl"}))
    assert not compared.usable(group(0, [1.0])) and compared.usable(group(0, [1.0, 1.0]))
    assert not compared.teaches(group(0, [1.0, 1.0])) and compared.teaches(group(0, [1.0, 0.0]))
    half = [group(0, [1.0, 1.0]), group(1, [1.0, 0.0])]
    assert compared.lesson(half, {}).record["group_signal"] == 0.5
    for signals in (alone, taught):
        assert signals.lesson(half, {}).record["group_signal"] == 1.0
        assert signals.usable(group(0, [1.0])) and not signals.usable(group(0, []))
        assert signals.teaches(group(0, [1.0, 1.0]))


def test_a_signal_is_an_advantage_that_is_not_zero():
    """Rewards that differ teach nothing where the advantage does not compare them."""
    signals = Signals(settings(advantage={"type": "max_rl"}))
    below = group(0, [-1.0, -0.5])
    assert not signals.teaches(below) and signals.teaches(group(1, [1.0, 0.5]))
    assert signals.lesson([below, group(1, [1.0, 0.5])], {}).record["group_signal"] == 0.5
    signals = Signals(settings(advantage={"type": "hierarchical"}))
    agents = group(0, [0.0, 0.0, 1.0, 1.0])
    for rollout, agent in zip(agents.rollouts, [0.0, 0.0, 1.0, 1.0], strict=True):
        rollout.metrics["agent"] = agent
    assert not signals.teaches(agents)
    agents.rollouts[3].metrics["agent"] = 0.0
    assert signals.teaches(agents)
    signals = Signals(settings(advantage={"type": "reinforce_plus_plus", "baseline": "group"}))
    assert not signals.teaches(group(0, [1.0, 1.0])) and signals.teaches(group(0, [1.0, 0.0]))


@pytest.fixture
def own(tmp_path):
    """Advantages of the user's own, and how they are named."""
    (tmp_path / "own.py").write_text(
        "import time\n"
        "def picky(rewards, rollouts):\n    return (rewards > 2) * 1.0\n"
        "def endless(rewards, rollouts):\n    time.sleep(600)\n"
    )
    return lambda name: {"type": "python", "path": f"{tmp_path / 'own.py'}:{name}"}


async def test_a_function_of_the_user_says_what_teaches(own):
    signals = Signals(settings(advantage=own("picky")))
    assert not await signals.in_time(signals.teaches, group(0, [1.0, 0.0]))
    assert await signals.in_time(signals.teaches, group(0, [3.0, 0.0]))
    lesson = await signals.in_time(signals.lesson, [group(0, [1.0, 0.0]), group(1, [3.0, 0.0])], {})
    assert lesson.record["group_signal"] == 0.5


async def test_a_function_of_the_user_that_does_not_come_back_is_named(own, monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 0.2)
    signals = Signals(settings(advantage=own("endless")))
    with pytest.raises(BadInput, match=r"own\.py:endless did not come back within 0\.2 s"):
        await signals.in_time(signals.lesson, [group(0, [1.0, 0.0])], {})


def test_functions_of_later_stages_are_looked_for_at_the_start(own):
    def stack(path):
        late = {"name": "late", "type": "rl", "steps": 1, "algorithm": {"advantage": path}}
        return Stack.model_validate(STACK | {"stages": [*STACK["stages"], late]})

    look_for_own_functions(stack(own("picky")))
    with pytest.raises(BadInput, match="has no nowhere"):
        look_for_own_functions(stack(own("nowhere")))


def test_a_signal_is_one_of_shaped_rewards():
    signals = Signals(settings(shaping={"overlong": {"limit": 3, "buffer": 2}}))
    longer = group(0, [1.0, 1.0])
    assert not signals.teaches(longer)
    longer.rollouts[1].sampled = 3
    assert signals.teaches(longer)
    lesson = signals.lesson([longer], {})
    assert lesson.record == {"group_signal": 1.0, "reward_shaped": pytest.approx((0.5 + 0.0) / 2)}
    assert [advantage for _, advantage in advantages_of(lesson.samples)] == [0.25, -0.25, -0.25]


def test_only_rewards_that_are_learnt_from_are_shaped():
    """The answers of a teacher have no logprobs of a reference to be punished by."""
    shaping = {"divergence": {"weight": 1.0}}
    signals = Signals(settings(EASY | {"component": "ce"}, HARD, shaping=shaping))
    taught = group(0, [1.0, 0.0])
    assert signals.teaches(taught)
    assert signals.lesson([taught], {}).record["reward_shaped"] == 0.5
    with pytest.raises(ValueError, match="has no logprobs of a reference"):
        signals.lesson([group(1, [1.0, 0.0], "hard")], {})


def test_a_function_of_the_user_that_is_not_there_is_found_before_the_first_rollout():
    with pytest.raises(BadInput, match=r"algorithm\.advantage\.path: there is no file"):
        Signals(settings(advantage={"type": "python", "path": "nowhere.py:ranked"}))


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=4), min_size=2, max_size=6), st.data())
def test_baselines_go_on_from_the_record_of_the_batch_before(batches, data):
    """As in one process, wherever it is begun anew; records travel as JSON."""
    signals = Signals(settings(advantage=RAE))
    groups = [group(number, rewards) for number, rewards in enumerate(batches)]
    baseline, expected = 0.0, []
    for each in groups:
        for rollout in each.rollouts:
            expected += [rollout.reward - baseline] * len(rollout.samples)
            baseline = 0.75 * baseline + 0.25 * rollout.reward
    found, record = [], {"reward": 0.5}
    for each in groups:
        if data.draw(st.booleans()):
            signals = Signals(settings(advantage=RAE))
        lesson = signals.lesson([each], record)
        record = {"reward": 0.5, **lesson.record}
        found += [advantage for _, advantage in advantages_of(lesson.samples)]
    assert found == expected
    assert record == {"reward": 0.5, "group_signal": 1.0, "baseline/easy": baseline}


def test_baselines_of_environments_that_a_batch_lacks_are_carried_on():
    signals = Signals(settings(EASY, HARD, advantage=RAE))
    lesson = signals.lesson([group(0, [1.0])], {"baseline/hard": 0.5, "reward": 3.0})
    assert lesson.record == {"group_signal": 1.0, "baseline/hard": 0.5, "baseline/easy": 0.25}


def test_the_journal_keeps_what_is_remembered(tmp_path):
    """Also over a rollback: then it is that of the newest batch of the cut."""
    journal = Journal(tmp_path / "journal", incarnation=1)
    assert journal.record_before(0) == {}
    for index, kind in enumerate(["supervised", "rl", "rl", "supervised"]):
        place = Place(1, index, index, "main", index, False, False)
        journal.seal(place, kind, [], record={"baseline/easy": 0.1 + index})
        journal.apply(index)
        if index == 1:
            journal.snapshot(tmp_path / "cut.sqlite")
    assert [journal.record_before(index) for index in (1, 2, 3, 9)] == [
        {}, {"baseline/easy": 1.1}, {"baseline/easy": 2.1}, {"baseline/easy": 2.1},
    ]  # fmt: skip
    journal.close()
    again = Journal(tmp_path / "journal", incarnation=2, snapshot=tmp_path / "cut.sqlite")
    assert again.record_before(9) == {"baseline/easy": 1.1}
    again.close()


def test_solve_rates():
    curriculum = Curriculum(decay=0.75)
    first = [r for g in (group(0, [1, 0], solved=1.0), group(1, [1, 0], "hard")) for r in g.rollouts]
    rates = solve_rates(first, {}, curriculum)
    assert rates == {"easy": 1.0}, "hard does not tell whether it is solved"
    later = [r for g in (group(2, [1, 0], solved=0.0), group(3, [1], "hard", 1.0)) for r in g.rollouts]
    assert solve_rates(later, rates, curriculum) == {"easy": 0.75, "hard": 1.0}
    assert solve_rates([], rates, curriculum) == rates


def test_shares_are_largest_where_half_is_solved():
    weights = {"never": 2.0, "half": 1.0, "mostly": 1.0, "always": 1.0, "unknown": 3.0}
    rates = {"never": 0.0, "half": 0.5, "mostly": 0.75, "always": 1.0}
    assert shares(weights, rates, Curriculum(floor=0.125)) == {
        "never": 0.25, "half": 1.0, "mostly": 0.75, "always": 0.125, "unknown": 3.0,
    }  # fmt: skip


def test_a_curriculum_draws_by_what_the_record_remembers():
    own = settings(EASY, HARD, curriculum={"decay": 0.5, "floor": 0.01})
    signals = Signals(own)
    record = signals.lesson([group(0, [1.0, 0.0], solved=0.5), group(1, [0, 0], "hard", 0.0)], {}).record
    assert record == {"group_signal": 0.5, "solve_rate/easy": 0.5, "solve_rate/hard": 0.0}
    mix = Mix(own.environments, Seeds(0))
    drawn = [mix.choose(number, shares=signals.shares(record)) for number in range(300)]
    assert drawn == [mix.choose(number, shares=signals.shares(record)) for number in range(300)]
    assert drawn.count("hard") < 15
    plain = [mix.choose(number, shares=Signals(settings(EASY, HARD)).shares(record)) for number in range(300)]
    assert plain == [mix.draw(number).name for number in range(300)]
    assert 120 < plain.count("hard") < 180
    assert mix.draw(7, environment="hard").name == "hard"
