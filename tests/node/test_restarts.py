"""The decisions about who is started again, without any process."""

from __future__ import annotations

import math

import pytest

from stackrl.runtime.restarts import Failure, GivenUp, Restarts

ENGINES, RANKS = ["engine-0", "engine-1"], ["trainer-0", "trainer-1"]
WORKERS = ("trainer-0", "trainer-1", "orchestrator")
ORCHESTRATOR = Failure("orchestrator", "orchestrator was killed")
RANK = Failure("trainer-1", "trainer-1 was killed")
ENGINE = Failure("engine-1", "engine-1 was killed")


def decisions(limit: int = 5) -> Restarts:
    return Restarts(ENGINES, "orchestrator", RANKS, limit)


def test_an_engine_is_started_again_alone() -> None:
    restart = decisions().failed(ENGINE, 0)
    assert restart and (restart.processes, restart.new_incarnation) == (("engine-1",), False)


def test_a_rank_takes_all_ranks_and_the_orchestrator_with_it() -> None:
    restart = decisions().failed(RANK, 0)
    assert restart and (restart.processes, restart.new_incarnation) == (WORKERS, True)


def test_the_orchestrator_goes_alone_once_and_then_with_the_trainer() -> None:
    restarts = decisions()
    for alone in (True, False, False):
        restart = restarts.failed(ORCHESTRATOR, 0)
        assert restart and restart.new_incarnation is not alone
        assert restart.processes == (("orchestrator",) if alone else WORKERS)
        restarts.due(math.inf)


def test_an_optimizer_step_lets_the_orchestrator_go_alone_again() -> None:
    restarts = decisions()
    for index in range(4):
        restarts.progressed(index)
        restart = restarts.failed(ORCHESTRATOR, 0)
        assert restart and restart.processes == ("orchestrator",) and restart.count == 1
        restarts.due(math.inf)


def test_the_orchestrator_does_not_go_alone_where_ranks_have_left() -> None:
    restart = decisions().failed(ORCHESTRATOR, 0, done=["trainer-0"])
    assert restart and restart.processes == WORKERS


def test_pauses_grow_from_one_second_to_a_minute() -> None:
    restarts, pauses = decisions(limit=9), []
    for _ in range(9):
        restart = restarts.failed(ENGINE, 100.0)
        assert restart
        pauses.append(restart.at - 100)
        restarts.due(math.inf)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_restart_is_due_when_its_pause_is_over_and_only_once() -> None:
    restarts = decisions()
    restart = restarts.failed(ENGINE, 10.0)
    assert restarts.seconds_left(10.25) == 0.75 and restarts.due(10.9) == []
    assert set(restarts.pending) == {"engine-1"}
    assert restarts.due(11.0) == [restart]
    assert restarts.due(99.0) == [] and not restarts.pending and restarts.seconds_left(99) == math.inf


def test_the_limit_is_in_a_row_and_for_each_engine() -> None:
    restarts = decisions(limit=2)
    for engine in ENGINES * 2:
        assert restarts.failed(Failure(engine, "gone"), 0)
        restarts.due(math.inf)
    with pytest.raises(
        GivenUp, match=r"engine-1 was killed \(3 failures in a row, with no optimizer step in between\)"
    ):
        restarts.failed(ENGINE, 0)


def test_a_new_step_forgives() -> None:
    restarts = decisions(limit=1)
    for index in range(5):
        restarts.progressed(index)
        restart = restarts.failed(RANK, 0)
        assert restart and restart.count == 1
        restarts.due(math.inf)


def test_the_same_way_from_a_checkpoint_to_the_same_end_is_no_progress() -> None:
    restarts = decisions(limit=2)
    for count in (1, 2):
        for index in (50, 53, 57):
            restarts.progressed(index)
        restart = restarts.failed(RANK, 0)
        assert restart and restart.count == count
        restarts.due(math.inf)
    restarts.progressed(50)
    with pytest.raises(GivenUp):
        restarts.failed(RANK, 0)


def test_without_restarts_the_reason_stands_alone() -> None:
    with pytest.raises(GivenUp) as end:
        decisions(limit=0).failed(RANK, 0)
    assert str(end.value) == "trainer-1 was killed"


def test_bad_input_is_not_tried_again() -> None:
    with pytest.raises(GivenUp, match="would not get better by trying again"):
        decisions().failed(Failure("engine-0", "engine-0 ended with exit code 2: no such flag", 2), 0)


def test_a_run_that_its_guards_stopped_is_not_started_again() -> None:
    with pytest.raises(GivenUp):
        decisions().failed(Failure("orchestrator", "entropy fell", 3), 0)
    assert decisions().failed(Failure("engine-0", "exit code 3", 3), 0)


def test_who_waits_for_the_start_anyway_does_not_count_again() -> None:
    restarts = decisions(limit=1)
    assert restarts.failed(RANK, 0)
    assert restarts.failed(Failure("trainer-0", "lost its peer"), 0) is None
    assert restarts.failed(ORCHESTRATOR, 0) is None
    [restart] = restarts.due(math.inf)
    assert restart.reason == RANK.reason


def test_a_rank_that_fails_while_the_orchestrator_waits_makes_it_a_restart_of_all() -> None:
    restarts = decisions(limit=1)
    assert restarts.failed(ORCHESTRATOR, 0)
    restart = restarts.failed(RANK, 0.5)
    assert restart and restart.processes == WORKERS and restart.new_incarnation and restart.count == 1
    assert restarts.due(math.inf) == [restart]
