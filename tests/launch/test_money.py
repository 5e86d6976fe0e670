"""What machines cost: told, and held to a limit by the node program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import SERVES, fresh_home, make_run, process, start_node, wait_until

from stackrl.runtime.launch import money
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.run import RunError, State
from stackrl.schemas.limits import Limits

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(money.HOURLY_VARIABLE, raising=False)
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize(
    ("text", "hourly"),
    [("", None), ("  ", None), ("98.32", 98.32), ("$1.5 ", 1.5), ("0", 0.0), (98.32, 98.32)],
)
def test_a_price_is_read_from_the_environment(text: object, hourly: float | None) -> None:
    assert money.hourly_said({money.HOURLY_VARIABLE: text}) == hourly


@pytest.mark.parametrize("text", ["much", "-3", "nan", "inf"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RunError, match=r"not dollars per hour .*write it as in 98\.32"):
        money.hourly_said({money.HOURLY_VARIABLE: text})


def test_a_node_knows_its_price_from_whoever_says_it_first() -> None:
    run = make_run()
    rented = {"SKYPILOT_NODE_RANK": "0"}
    assert money.hourly_on_node(run, {}) == 0.0
    assert money.hourly_on_node(run, rented) is None
    Handle("slurm", hourly=3.0).write(run)
    assert money.hourly_on_node(run, rented) == 3.0
    assert money.hourly_on_node(run, rented | {money.HOURLY_VARIABLE: "7"}) == 7.0


def test_the_cost_is_hours_times_price() -> None:
    state = State(used=2 * HOUR)
    assert money.cost_so_far(state, Handle("local", hourly=0.0), 0.0) == 0.0
    assert money.cost_so_far(state, Handle("slurm", hourly=3.0), 0.0) == 6.0
    assert money.cost_so_far(state, Handle("slurm"), 0.0) is None
    cloud = Handle("sky", submitted=1000.0, hourly=3.0)
    assert money.cost_so_far(State(), cloud, 1000.0 + 4 * HOUR) == 12.0
    ended = Handle("sky", submitted=1000.0, hourly=3.0, ended=1000.0 + HOUR)
    assert money.cost_so_far(State(), ended, 1000.0 + 4 * HOUR) == 3.0
    assert money.cost_so_far(state, ended, 1000.0 + 4 * HOUR) == 6.0  # an earlier launch counts too


def test_costs_are_told_where_there_are_any() -> None:
    assert [money.told(*pair) for pair in ((0.0, 0.0), (1234.5, 2.0), (None, None))] == [
        "",
        "$1,234.50",
        "unknown",
    ]


def test_a_run_that_has_cost_what_it_may_is_not_begun_again() -> None:
    run = make_run()
    run.write_state(State("stopped", used=2 * HOUR))
    price = {money.HOURLY_VARIABLE: "5"}
    money.refuse_spent(run, Limits(), price)
    money.refuse_spent(run, Limits(cost=10.01), price)
    with pytest.raises(RunError, match=r"has cost \$10\.00 of its \$10\.00 .*--set limits\.cost=20`"):
        money.refuse_spent(run, Limits(cost=10.0), price)


def test_a_limit_that_nobody_could_hold_is_refused() -> None:
    with pytest.raises(RunError, match=r"end at \$10\.00 .*write `envs: \{STACKRL_HOURLY: …\}`"):
        money.refuse_spent(make_run(), Limits(cost=10.0), {"SKYPILOT_NODE_RANK": "0"})
    with pytest.raises(RunError, match=r"end at \$10\.00"):
        money.hourly_noted(Limits(cost=10.0), {}, None)
    assert money.hourly_noted(Limits(), {}, None) is None
    assert money.hourly_noted(Limits(cost=10.0), {money.HOURLY_VARIABLE: "7"}, None) == 7.0
    assert money.hourly_noted(Limits(cost=10.0), {money.HOURLY_VARIABLE: "7"}, 3.0) == 7.0
    assert money.hourly_noted(Limits(cost=10.0), {}, 3.0) == 3.0
    money.refuse_spent(make_run(), Limits(cost=10.0), {})


def test_a_run_ends_at_its_price() -> None:
    """A dollar a second."""
    run = make_run(process("orchestrator", SERVES), cost=1.0)
    node = start_node(run, **{money.HOURLY_VARIABLE: "3600"})
    assert node.wait(timeout=30) == 1
    state = run.state()
    assert (state.status, state.reason) == ("stopped", "stopped after $1.00, its limit (limits.cost)")
    assert 1.0 < state.used < 20
    again = start_node(run, **{money.HOURLY_VARIABLE: "3600"})
    assert again.wait(timeout=30) != 0 and run.state().attempt == 1


def test_a_run_that_costs_nothing_goes_on() -> None:
    run = make_run(process("orchestrator", SERVES), cost=1e-9)
    start_node(run)
    wait_until(lambda: run.state().status == "running" and run.state().used > 0)
    assert run.keeper() is not None
