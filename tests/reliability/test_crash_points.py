"""Killed before or after any commit of the journal, any part of a checkpoint, any reply: nothing is lost."""

from __future__ import annotations

from pathlib import Path
from random import Random

import crashing
import pytest
import trials
from crashing import Crash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IN_DEFAULT_TESTS = (0, 3, 4, 5, 6, 7, 9, 10)
"""Each kills elsewhere: engine, ranks and orchestrator, in the journal, the batches, a checkpoint."""
NIGHTLY = 200


def _try(seed: int, folder: Path, tokenizer: Path) -> None:
    crashes = trials.draw_crashes(Random(seed))
    run = trials.make_run(folder, tokenizer, crashes)
    trials.live(run)
    trials.check(run)


@pytest.mark.parametrize("seed", IN_DEFAULT_TESTS)
def test_nothing_is_lost_and_nothing_trained_twice(seed: int, tmp_path: Path, tokenizer: Path) -> None:
    _try(seed, tmp_path, tokenizer)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted({*range(NIGHTLY)} - {*IN_DEFAULT_TESTS}))
def test_nothing_is_lost_in_many_trials(seed: int, tmp_path: Path, tokenizer: Path) -> None:
    _try(seed, tmp_path, tokenizer)


def test_without_a_fault_the_run_needs_one_life(tmp_path: Path, tokenizer: Path) -> None:
    run = trials.make_run(tmp_path, tokenizer, [])
    assert trials.live(run) == 1
    trials.check(run)
    assert run.state().incarnation == 1


def test_without_the_rollback_a_run_does_not_get_through(tmp_path: Path, tokenizer: Path) -> None:
    """Negative control: where the journal goes on beyond the checkpoint, that does not go unnoticed."""
    crash = Crash("trainer-0", "light_trainer:LightLearner.apply", "after", trials.SUPERVISED + 6)
    soon = trials.STACK["limits"] | {"restarts": 2}  # each pause before one is twice the last one
    run = trials.make_run(tmp_path, tokenizer, [crash], limits=soon)
    with pytest.raises(AssertionError):
        trials.live(run, **{crashing.KEEPS_JOURNAL: "1"})
        trials.check(run)
    assert crashing.happened(run.path) == [0] and run.state().incarnation > 1
