"""Each guard sees its sign from its threshold on, as long as it is told to, once, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stackrl.runtime.monitor.guards import Alarm, Guards
from stackrl.schemas.guards import Guards as Settings

GOOD: dict[str, Any] = {
    "kind": "rl",
    "stage": "main",
    "reward": 0.5,
    "reward_std": 0.3,
    "rollouts": 64,
    "solved": 0.2,
    "group_signal": 0.9,
    "trainer/loss": 0.1,
    "trainer/gradient_norm": 1.0,
    "trainer/skipped": 0.0,
    "trainer/entropy": 1.0,
    "trainer/mismatch_kl": 0.002,
    "trainer/weights_finite": 1.0,
}


class Watched:
    """Guards, and the steps that they have seen."""

    def __init__(self, past: list[dict[str, Any]] | None = None, **settings: Any) -> None:
        self.guards = Guards(Settings.model_validate(settings), past or [])
        self.step = len(past or [])

    def see(self, steps: int = 1, without: str = "", **changes: Any) -> list[Alarm]:
        """So many steps like GOOD with changes (``__`` for `/`); all alarms."""
        alarms = []
        for _ in range(steps):
            record = GOOD | {"stage_step": self.step} | {k.replace("__", "/"): v for k, v in changes.items()}
            record.pop(without, None)
            alarms += self.guards.check(record)
            self.step += 1
        return alarms


def names(alarms: list[Alarm]) -> list[str]:
    return [alarm.name for alarm in alarms]


def test_a_good_run_raises_no_alarm() -> None:
    watched = Watched()
    for reward in (0.5, 0.55, 0.48, 0.52, 0.51) * 20:
        assert watched.see(reward=reward) == []


@pytest.mark.parametrize(
    ("guard", "settings", "before", "over", "under"),
    [
        # the sign begins between `under` and `over`; ``before`` steps make what is normal
        ("mismatch", {}, 0, {"trainer__mismatch_kl": 0.101}, {"trainer__mismatch_kl": 0.1}),
        ("mismatch", {"growth": 4}, 10, {"trainer__mismatch_kl": 0.0101}, {"trainer__mismatch_kl": 0.01}),
        (
            "mismatch",
            {"growth": 4, "growth_above": 0},
            10,
            {"trainer__mismatch_kl": 0.00801},
            {"trainer__mismatch_kl": 0.0079},
        ),
        ("entropy_collapse", {}, 10, {"trainer__entropy": 0.099}, {"trainer__entropy": 0.101}),
        ("no_signal", {}, 0, {"group_signal": 0.09}, {"group_signal": 0.11}),
        # 64 rollouts with signal and 577 that they took the place of: over 90 %
        (
            "no_signal",
            {},
            0,
            {"group_signal": 1.0, "dropped__no_signal": 577},
            {"group_signal": 1.0, "dropped__no_signal": 575},
        ),
        # 6 standard errors of 64 rollouts that spread by 0.3
        ("reward_jump", {}, 20, {"reward": 0.5 + 0.226}, {"reward": 0.5 + 0.224}),
        ("reward_jump", {}, 20, {"reward": 0.5 - 0.226}, {"reward": 0.5 - 0.224}),
        ("not_finite", {}, 0, {"trainer__loss": None}, {"trainer__loss": -3.0}),
        ("not_finite", {}, 0, {"trainer__loss": math.nan}, {"trainer__loss": 0.0}),
        ("not_finite", {}, 0, {"trainer__gradient_norm": None}, {"trainer__gradient_norm": 1e9}),
        ("not_finite", {}, 0, {"trainer__skipped": 1.0}, {"trainer__skipped": 0.0}),
    ],
)
def test_a_guard_speaks_from_its_threshold_on(
    guard: str, settings: dict[str, Any], before: int, over: dict[str, Any], under: dict[str, Any]
) -> None:
    settings = {guard: {"steps": 3, "action": "warn"} | settings}
    watched = Watched(**settings)
    assert watched.see(before) == []
    assert watched.see(9, **under) == []
    watched = Watched(**settings)
    watched.see(before)
    assert watched.see(2, **over) == []
    assert watched.see(1) == [], "not in a row"
    assert watched.see(2, **over) == []
    assert names(watched.see(1, **over)) == [guard]


def test_an_alarm_is_raised_once_until_its_sign_was_gone_as_long_as_it_had_to_be_there() -> None:
    watched = Watched(mismatch={"steps": 3})
    assert names(watched.see(50, trainer__mismatch_kl=1.0)) == ["mismatch"]
    assert watched.see(2) == [] and watched.see(9, trainer__mismatch_kl=1.0) == []
    assert watched.see(3) == [] and names(watched.see(9, trainer__mismatch_kl=1.0)) == ["mismatch"]


def test_a_new_stage_begins_anew() -> None:
    watched = Watched(entropy_collapse={"steps": 2}, mismatch={"steps": 3})
    watched.see(10, trainer__entropy=5.0)
    assert watched.see(20, stage="next", trainer__entropy=0.4) == []
    assert watched.see(2, stage="next", trainer__mismatch_kl=1.0) == []
    assert watched.see(2, stage="last", trainer__mismatch_kl=1.0) == []
    assert names(watched.see(1, stage="last", trainer__mismatch_kl=1.0)) == ["mismatch"]


def test_weights_that_are_not_finite_count_at_once_and_are_not_saved() -> None:
    watched = Watched()
    (alarm,) = watched.see(trainer__weights_finite=0.0)
    assert (alarm.name, alarm.action, alarm.save) == ("not_finite", "stop", False)
    assert alarm.text == "stage main, step 0: the weights are not finite"


def test_skipped_steps_are_saved_only_where_the_weights_are_known_to_be_finite() -> None:
    (alarm,) = Watched().see(3, trainer__loss=None, trainer__skipped=1.0)
    assert alarm.save and alarm.action == "stop"
    (alarm,) = Watched().see(3, without="trainer/weights_finite", trainer__loss=None, trainer__skipped=1.0)
    assert not alarm.save
    assert alarm.text == (
        "stage main, step 2: the loss is not finite, and the step was skipped, 3 steps in a row"
    )


def test_numbers_that_were_lost_on_the_way_say_nothing() -> None:
    watched = Watched()
    lost = {key: value for key, value in GOOD.items() if not key.startswith("trainer/")}
    assert [watched.guards.check(lost | {"stage_step": step}) for step in range(20)] == [[]] * 20


def test_demonstrations_may_be_learnt_by_heart() -> None:
    watched = Watched()
    supervised = {"kind": "supervised", "stage": "warmup", "without": "reward"}
    assert watched.see(10, **supervised, trainer__entropy=5.0) == []
    assert watched.see(50, **supervised, trainer__entropy=0.001) == []


@pytest.mark.parametrize("guard", ["entropy_collapse", "no_signal"])
def test_a_task_that_is_learnt_needs_neither_entropy_nor_signal(guard: str) -> None:
    signs = {"trainer__entropy": 0.01, "group_signal": 0.0}
    watched = Watched()
    watched.see(10)
    assert watched.see(30, **signs, solved=0.9) == []
    assert set(names(watched.see(30, **signs, solved=0.89))) == {"entropy_collapse", "no_signal"}
    watched = Watched(**{guard: {"unless_solved": None}})
    watched.see(10)
    assert names(watched.see(30, **signs, solved=1.0)) == [guard]


def test_a_reward_that_has_jumped_is_the_new_normal() -> None:
    watched = Watched()
    watched.see(20)
    (alarm,) = watched.see(60, reward=0.95)
    assert "the reward rose to 0.95; the mean of the 20 steps before was 0.5" in alarm.text
    (alarm,) = watched.see(60, reward=0.5)
    assert "fell to 0.5" in alarm.text


def test_a_reward_that_is_learnt_does_not_jump() -> None:
    watched = Watched()
    rewards = [0.1 + 0.8 / (1 + math.exp((30 - step) / 6)) for step in range(80)]
    assert [alarm for reward in rewards for alarm in watched.see(reward=reward)] == []


def test_what_jumps_up_and_down_does_not_stay_there() -> None:
    watched = Watched()
    watched.see(20)
    assert [alarm for reward in (0.9, 0.1) * 3 for alarm in watched.see(reward=reward)] == []


def test_what_was_normal_is_known_again_after_a_restart_and_alarms_are_raised_anew() -> None:
    past = [GOOD | {"stage_step": step, "trainer/entropy": 1.0 if step < 10 else 0.01} for step in range(40)]
    assert names(Watched(past).see(9, trainer__entropy=0.01)) == []
    assert names(Watched(past).see(10, trainer__entropy=0.01)) == ["entropy_collapse"]
    assert names(Watched().see(50, trainer__entropy=0.01)) == []


def test_a_guard_can_be_told_to_stop_the_run_or_to_be_silent() -> None:
    (alarm,) = Watched(mismatch={"action": "stop"}).see(9, trainer__mismatch_kl=1.0)
    assert (alarm.action, alarm.save) == ("stop", True)
    assert Watched(mismatch={"action": "ignore"}).see(9, trainer__mismatch_kl=1.0) == []
