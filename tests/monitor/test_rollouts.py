"""Rollouts that are kept for the report: what was trained on comes back, and nothing stands in the way."""

from __future__ import annotations

import gzip
import logging
import stat
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest
from written_runs import make_group, samples_of

from stackrl.runtime.monitor import rollouts
from stackrl.runtime.monitor.kept_rollouts import count_rollouts, read_steps
from stackrl.runtime.monitor.rollouts import RolloutLog
from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.schemas.stack import Rollouts


def groups_of(step: int, count: int = 2):
    """Groups of 4, with a second turn and a broken prefix among them."""
    random = Random(step)
    return [
        make_group(number, step, lambda group, n: f"said {group}-{n}", random, 10)
        for number in range(step * count, (step + 1) * count)
    ]


def keep(folder: Path, steps: range, settings: Rollouts) -> None:
    log = RolloutLog(folder, settings)
    for step in steps:
        groups = groups_of(step)
        log.add(step, step, "main", groups, samples_of(groups))
    log.close()


def kept_steps(folder: Path) -> list[int]:
    return [step.about.step for step in read_steps(folder)]


def test_what_the_trainer_gets_is_what_is_kept(tmp_path):
    groups = groups_of(3)
    log = RolloutLog(tmp_path, Rollouts())
    log.add(7, 3, "main", groups, samples_of(groups))
    log.close()
    (step,) = read_steps(tmp_path)
    assert (step.about.index, step.about.step, step.about.stage, step.about.rollouts) == (7, 3, "main", 8)
    assert [kept.id for kept in step.rollouts] == [r.id for group in groups for r in group.rollouts]

    samples = samples_of(groups)
    place = Place(1, 7, 3, "main", 3, False, False)
    batches = build(samples, place, Layout(4096, 2, cost=float))
    trained = {}
    for micro in (micro for batch in batches for micro in batch.micro_batches):
        ends = np.cumsum(micro.lengths)
        for name, end, length, advantage in zip(
            micro.documents, ends, micro.lengths, micro.advantages, strict=True
        ):
            part = slice(end - length, end)
            trained[name] = (micro.tokens[part], micro.loss_mask[part], micro.logprobs[part], advantage)
    kept = {
        sequence.document: (rollout, sequence) for rollout in step.rollouts for sequence in rollout.sequences
    }
    assert kept.keys() == trained.keys()
    assert any("/" in name for name in kept), "no prefix was broken"
    for name, (rollout, sequence) in kept.items():
        tokens, mask, logprobs, advantage = trained[name]
        assert sequence.tokens == tokens.tobytes()
        assert sequence.trained == mask.tobytes()
        assert sequence.logprobs == logprobs[mask == 1].tobytes()
        assert rollout.advantage == pytest.approx(advantage)
    spans = kept["6-0"][1].spans
    assert {span.version for span in spans} == {"1.2", "1.3"}


def test_the_logprobs_of_all_ranks_come_together(tmp_path):
    log = RolloutLog(tmp_path, Rollouts())
    log.add(0, 0, "main", groups_of(0), samples_of(groups_of(0)))
    log.add_logprobs(0, ["0-0", "1-1"], np.array([2, 1]), np.array([-1.0, -2.0, -3.0]))
    log.add_logprobs(0, ["0-2/1"], np.array([1]), np.array([-4.0]))
    log.add_logprobs(5, ["9-9"], np.array([1]), np.array([-4.0]))
    log.close()
    (step,) = read_steps(tmp_path)
    assert {name: list(values) for name, values in step.logprobs.items()} == {
        "0-0": [-1.0, -2.0],
        "1-1": [-3.0],
        "0-2/1": [-4.0],
    }


def test_a_batch_that_is_added_again_keeps_its_logprobs(tmp_path):
    keep(tmp_path, range(1), Rollouts())
    log = RolloutLog(tmp_path, Rollouts())
    log.add_logprobs(0, ["0-0"], np.array([1]), np.array([-1.0]))
    log.add(0, 0, "main", groups_of(0), samples_of(groups_of(0)))
    log.close()
    (step,) = read_steps(tmp_path)
    assert step.logprobs.keys() == {"0-0"}


def test_every_third_step_is_kept(tmp_path):
    log = RolloutLog(tmp_path, Rollouts(every=3))
    assert [step for step in range(8) if log.wanted(step)] == [0, 3, 6]
    log.close()
    keep(tmp_path, range(8), Rollouts(every=3))
    assert kept_steps(tmp_path) == [6, 3, 0]


def test_nothing_is_kept_where_the_stack_says_so(tmp_path):
    folder = tmp_path / "rollouts"
    log = RolloutLog(folder, None)
    log.add(0, 0, "main", groups_of(0), samples_of(groups_of(0)))
    log.add_logprobs(0, ["0-0"], np.array([1]), np.array([-1.0]))
    log.forget_from(0)
    log.close()
    assert not log.wanted(0)
    assert not folder.exists()


def test_the_newest_stay(tmp_path):
    keep(tmp_path, range(5), Rollouts(keep=20))
    assert kept_steps(tmp_path) == [4, 3, 2], "8 rollouts a step: three steps hold the newest 20"
    keep(tmp_path, range(5, 6), Rollouts(keep=20))
    assert kept_steps(tmp_path) == [5, 4, 3]
    assert count_rollouts(tmp_path) == 24
    assert [step.about.step for step in read_steps(tmp_path, newest=9)] == [5, 4]
    keep(tmp_path, range(6, 7), Rollouts(keep=1))
    assert kept_steps(tmp_path) == [6], "the newest step stays, however large"


def test_steps_that_are_taken_again_are_forgotten_first(tmp_path):
    keep(tmp_path, range(5), Rollouts())
    log = RolloutLog(tmp_path, Rollouts())
    log.forget_from(3)
    assert kept_steps(tmp_path) == [2, 1, 0]
    log.close()


def test_only_the_owner_may_read(tmp_path):
    keep(tmp_path / "rollouts", range(1), Rollouts())
    (file,) = (tmp_path / "rollouts").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: d[:10], lambda d: d[:500], lambda d: gzip.compress(b"\xc1") + d],
    ids=["empty", "cut in the first member", "cut in the second", "another thing"],
)
def test_a_damaged_file_is_passed_over_and_then_replaced(tmp_path, caplog, damage):
    keep(tmp_path, range(3), Rollouts())
    damaged = tmp_path / "step-000001.msgpack.gz"
    damaged.write_bytes(damage(damaged.read_bytes()))
    (tmp_path / ".step-000009.msgpack.gz").write_bytes(b"a write that was cut short")
    assert kept_steps(tmp_path) == [2, 0]
    assert "step-000001" in caplog.text
    keep(tmp_path, range(1, 2), Rollouts(keep=17))
    assert kept_steps(tmp_path) == [2, 1, 0], "the damaged file was counted"
    assert not list(tmp_path.glob(".*"))
    keep(tmp_path, range(3, 4), Rollouts(keep=17))
    assert kept_steps(tmp_path) == [3, 2, 1]


def test_a_disk_that_does_not_take_it_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "rollouts"
    log = RolloutLog(folder, Rollouts())
    log.forget_from(0)
    folder.rmdir()
    folder.write_text("no folder any more")
    log.add(0, 0, "main", groups_of(0), samples_of(groups_of(0)))
    log.close()
    assert "the report will lack step 1" in caplog.text


def test_a_slow_disk_holds_nobody_up_and_takes_no_memory(tmp_path, caplog, monkeypatch):
    opened = threading.Event()
    replace = rollouts.replace_file

    def slowly(file, data):
        opened.wait(20)
        replace(file, data)

    monkeypatch.setattr(rollouts, "replace_file", slowly)
    caplog.set_level(logging.WARNING)
    log = RolloutLog(tmp_path, Rollouts())
    groups = groups_of(0)
    for step in range(rollouts._MOST_WAITING + 3):
        log.add(step, step, "main", groups, samples_of(groups))  # returns while the disk takes nothing
    assert not kept_steps(tmp_path)
    assert "the disk is too slow" in caplog.text
    opened.set()
    log.close()
    assert rollouts._MOST_WAITING - 1 <= len(kept_steps(tmp_path)) <= rollouts._MOST_WAITING + 1
