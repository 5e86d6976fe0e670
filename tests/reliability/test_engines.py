"""Engines that are killed in the middle of a transfer, get damaged weights, leave and join, in whole runs."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import transfer_faults
import trials
from fake_roles import wait_until
from small_runs import lines
from trials import events, mounted, pid_of, reached, started

from stackrl.runtime.launch import scaling
from stackrl.runtime.run import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = {"limits": {"silence_seconds": 20, "restarts": 3, "stop_seconds": 20}}


def all_loaded(run: RunFolder) -> dict[str, list[list[int]]]:
    """Version → what each engine got as that version."""
    found = defaultdict(list)
    for book in run.path.glob("loaded-*.jsonl"):
        for loaded in lines(book):
            found[loaded["version"]].append(loaded["sum"])
    return found


def check(run: RunFolder) -> None:
    """The books are clean, and no two engines had other weights under one label."""
    trials.check(run)
    assert all(sums == sums[:1] * len(sums) for sums in all_loaded(run).values())


def log_of(run: RunFolder, name: str) -> str:
    return (run.logs(1) / f"{name}.log").read_text()


def test_an_engine_killed_in_the_middle_of_a_transfer(tmp_path: Path, tokenizer: Path) -> None:
    run = trials.make_run(tmp_path, tokenizer, [], **LIMITS, stages=trials.stages(rl=60))
    with started(run) as node:
        wait_until(lambda: reached(run, 4), limit=120)
        (run.path / transfer_faults.SLOW).touch()
        wait_until((run.path / "loading-engine-0").exists, limit=60)
        os.kill(pid_of(run, "engine-0"), signal.SIGKILL)
        (run.path / "loading-engine-0").unlink()
        (run.path / transfer_faults.SLOW).unlink()
        assert node.wait(trials.LIMIT) == 0, trials.tail(run)
    [restarted] = events(run, "restarted")
    assert restarted["process"] == "engine-0" and "was killed by SIGKILL" in restarted["reason"]
    [lost] = events(run, "engine_lost")
    assert lost["engine"] == run.endpoints().engines[0]
    check(run)


@pytest.mark.nightly
def test_a_corrupted_chunk_is_fetched_again_and_said_once(tmp_path: Path, tokenizer: Path) -> None:
    run = trials.make_run(tmp_path, tokenizer, [], **LIMITS, stages=trials.stages(rl=20))
    with started(run) as node:
        wait_until(lambda: reached(run, 4), limit=120)
        (run.path / transfer_faults.CORRUPT).touch()
        assert node.wait(trials.LIMIT) == 0, trials.tail(run)
    assert not (run.path / transfer_faults.CORRUPT).exists()
    told = [log_of(run, f"engine-{index}") for index in range(2)]
    assert sum("chunk" in text for text in told) == 1, told
    assert not events(run, "restarted") and not events(run, "engine_lost")
    check(run)


@pytest.mark.nightly
def test_a_receiver_whose_disk_is_full_fetches_all_and_says_so_once(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=32k", "none"):
        monkeypatch.setenv("STACKRL_HELD_WEIGHTS", str(disk / "held"))
        delta = {"weights": {"transport": "pull", "content": "delta"}}
        run = trials.make_run(tmp_path, tokenizer, [], **LIMITS, **delta, stages=trials.stages(rl=20))
        with started(run) as node:
            assert node.wait(trials.LIMIT) == 0, trials.tail(run)
        for index in range(2):
            assert log_of(run, f"engine-{index}").count("No space left") == 1, trials.tail(run)
        check(run)


@pytest.mark.nightly
def test_engines_leave_and_join_in_a_run(tmp_path: Path, tokenizer: Path) -> None:
    run = trials.make_run(tmp_path, tokenizer, [], **LIMITS, stages=trials.stages(rl=120))
    with started(run) as node:
        wait_until(lambda: reached(run, 4), limit=120)
        scaling.scale(run.id, ["inference=1"])
        wait_until(lambda: run.state().roles["engine-1"] == "ended", limit=60)
        alone = lines(run.metrics)[-1]["index"]
        wait_until(lambda: reached(run, alone + 3), limit=60)
        scaling.scale(run.id, ["inference=3"])
        wait_until(lambda: len(events(run, "engine_joined")) == 2, limit=60)
        assert node.wait(trials.LIMIT) == 0, trials.tail(run)
    assert len(events(run, "engine_left")) == 1 and not events(run, "engine_lost")
    assert {path.name for path in run.path.glob("loaded-*")} == {f"loaded-engine-{n}.jsonl" for n in range(3)}
    check(run)
