"""Which rows a step learns is a function of seed, stage and step."""

from __future__ import annotations

import numpy as np
import pytest

from stackrl.runtime.data.order import Order, held_out, held_out_count, places_of, steps_of
from stackrl.runtime.orchestrator.seeds import Seeds

SEEDS = Seeds(3).branch("supervised", "sums")
ORDERED = [5, 2, 7, 1, 3, 4, 0, 6]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    order = Order(np.arange(50) * 2, SEEDS, shuffle=True)
    epochs = [order.between(50 * n, 50 * (n + 1)) for n in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 2)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.between(40, 60) == epochs[0][40:] + epochs[1][:10]


def test_the_order_is_the_same_wherever_it_is_begun_and_another_for_other_seeds():
    whole = Order(range(50), SEEDS, shuffle=True).between(0, 500)
    assert Order(range(50), SEEDS, shuffle=True).between(320, 340) == whole[320:340]
    assert Order(range(50), Seeds(4).branch("supervised", "sums"), shuffle=True).between(0, 50) != whole[:50]
    assert Order(range(50), Seeds(3).branch("supervised", "b"), shuffle=True).between(0, 50) != whole[:50]


def test_the_order_is_that_of_runs_that_were_begun_before():
    """Numbers that must never change: a run that goes on would learn other rows."""
    assert Order(range(8), SEEDS, shuffle=True).between(0, 8) == ORDERED


def test_without_shuffling_rows_come_as_they_stand():
    assert Order([4, 2, 9], SEEDS, shuffle=False).between(0, 7) == [4, 2, 9, 4, 2, 9, 4]


def test_held_out_rows_are_no_others():
    learnt, out = held_out(100, 0.05, SEEDS)
    assert len(out) == 5 and sorted([*learnt, *out]) == list(range(100))
    assert np.array_equal(held_out(100, 0.05, SEEDS)[1], out)
    assert held_out_count(3, 0.01) == 1 and held_out_count(2, 0.99) == 1 and held_out_count(1, 0.5) == 0


@pytest.mark.parametrize(
    ("rows", "epochs", "size", "steps"), [(100, 1, 32, 4), (96, 2, 32, 6), (3, 0.1, 8, 1)]
)
def test_steps_of_epochs(rows, epochs, size, steps):
    assert steps_of(rows, epochs, size) == steps
    assert places_of(rows, epochs) <= steps * size
