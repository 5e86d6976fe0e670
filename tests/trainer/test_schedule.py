"""Learning rates against values worked out by hand, at the corners of each schedule."""

from __future__ import annotations

import pytest

from stackrl.runtime.trainer.schedule import rate
from stackrl.schemas.optimizers import AdamW


def rates(total: int = 10, warmup: int = 0, **schedule: object) -> list[float]:
    settings = AdamW(learning_rate=1.0, warmup_steps=warmup, schedule=schedule)
    return [rate(step, settings, total) for step in range(total)]


def test_warmup_grows_to_the_rate_in_equal_steps() -> None:
    assert rates(warmup=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_constant_rate_stays() -> None:
    assert rates() == [1.0] * 10


def test_the_rate_is_the_optimizers() -> None:
    settings = AdamW(learning_rate=0.3, warmup_steps=2, schedule={"type": "linear"})
    assert [rate(step, settings, 6) for step in (0, 1, 2, 4)] == pytest.approx([0.15, 0.3, 0.3, 0.15])


def test_linear_decay_falls_evenly_towards_its_final_share() -> None:
    expected = [1.0 - 0.1 * step for step in range(8)]
    assert rates(warmup=2, type="linear", final_rate=0.2)[2:] == pytest.approx(expected)


def test_linear_decay_ends_at_nothing_by_default() -> None:
    assert rates(total=4, type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_cosine_decay_is_half_way_to_its_minimum_in_the_middle() -> None:
    values = rates(total=8, type="cosine", final_rate=0.2)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.6)
    assert values[2] == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)
    assert values == sorted(values, reverse=True)


def test_cosine_decay_keeps_a_tenth_by_default() -> None:
    values = rates(total=1000, warmup=10, type="cosine")
    assert values[9] == values[10] == 1.0
    assert values[-1] == pytest.approx(0.1, abs=1e-5) and values[-1] > 0.1


def test_warmup_stable_decay_has_its_three_parts() -> None:
    values = rates(total=20, warmup=4, type="warmup-stable-decay", decay_share=0.2)
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert values[4:17] == [1.0] * 13, "the decay begins at the full rate"
    assert values[17:] == pytest.approx([0.75, 0.5, 0.25])


def test_warmup_stable_decay_ends_at_its_final_share() -> None:
    values = rates(total=10, type="warmup-stable-decay", decay_share=0.5, final_rate=0.5)
    assert values == pytest.approx([1.0] * 6 + [0.9, 0.8, 0.7, 0.6])


def test_a_decay_over_all_steps_is_linear() -> None:
    whole = rates(type="warmup-stable-decay", decay_share=1.0, final_rate=0.3)
    assert whole == pytest.approx(rates(type="linear", final_rate=0.3))


def test_a_short_stage_still_has_a_step_of_decay() -> None:
    assert rates(total=3, type="warmup-stable-decay") == [1.0] * 3
    assert rates(total=1, type="warmup-stable-decay") == [1.0]


def test_a_stage_that_is_all_warmup_has_a_rate() -> None:
    assert rates(total=3, warmup=3, type="cosine") == pytest.approx([1 / 3, 2 / 3, 1.0])
