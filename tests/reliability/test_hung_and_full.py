"""Processes that are stopped, disks that are full or read-only: the run recovers, or ends with the reason."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trials
from fake_roles import wait_until
from small_runs import lines
from trials import events, mounted, pid_of, reached, started

from stackrl.runtime.launch.audit import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SILENCE = 5.0
MARGIN = 20.0
IMPATIENT = {"limits": {"silence_seconds": SILENCE, "restarts": 3, "stop_seconds": 20}}


@pytest.mark.parametrize(
    "process",
    [
        "engine-0",
        "orchestrator",
        pytest.param("trainer-0", marks=pytest.mark.nightly),
        pytest.param("trainer-1", marks=pytest.mark.nightly),
    ],
)
def test_a_stopped_process_is_found_named_and_replaced(tmp_path: Path, tokenizer: Path, process: str) -> None:
    alone = process.startswith("engine")  # the other engine must not end the run before this one is back
    stages = trials.stages(rl=80 if alone else 12)
    run = trials.make_run(tmp_path, tokenizer, [], **IMPATIENT, stages=stages)
    with started(run) as node:
        wait_until(lambda: reached(run, 3), limit=120)
        os.kill(pid_of(run, process), signal.SIGSTOP)
        stopped = time.time()
        assert node.wait(trials.LIMIT) == 0, trials.tail(run)
    restarted = events(run, "restarted")
    first = min(event["time"] for event in restarted)
    assert first - stopped < SILENCE + MARGIN
    assert process in {event["process"] for event in restarted}
    assert all(f"{process} was silent" in event["reason"] for event in restarted)
    assert all("SIGSTOP" in event["reason"] for event in restarted)
    trials.check(run)


def test_a_full_disk_ends_the_run_by_name_and_it_goes_on_when_there_is_room(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=24m", "none"):
        monkeypatch.setenv("STACKRL_HOME", str(disk / "home"))
        run = trials.make_run(tmp_path, tokenizer, [], **IMPATIENT)
        with started(run) as node:
            wait_until(lambda: reached(run, 4), limit=120)
            trained = lines(run.metrics)[-1]["index"]
            with full(disk):
                began = time.monotonic()
                assert node.wait(120) == 1, trials.tail(run)
                pauses = 1 + 2 + 4
                assert time.monotonic() - began < pauses + 4 * 12 + MARGIN  # four starts of seconds each
                state = run.state()
        assert state.status == "failed", state
        assert "No space left" in state.reason or "disk is full" in state.reason, state.reason
        assert trials.live(run) == 1
        trials.check(run)
        assert {record["index"] for record in lines(run.metrics)} >= set(range(trained))


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Whatever becomes free is taken at once."""
    ballast, over = disk / "ballast", threading.Event()

    def fill() -> None:
        with open(ballast, "wb", buffering=0) as file:
            while not over.wait(0.001):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * 1024)

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        over.set()
        filling.join()
        ballast.unlink()


def test_a_journal_that_turns_read_only_is_named_and_nothing_is_lost(tmp_path: Path, tokenizer: Path) -> None:
    run = trials.make_run(tmp_path, tokenizer, [], **IMPATIENT)
    with started(run) as node:
        wait_until(lambda: reached(run, 4), limit=120)
        aside = tmp_path / "read-only"
        aside.mkdir()
        with mounted(
            aside, "--bind", str(run.journal)
        ):  # a mount that somebody writes through stays writable
            subprocess.run(["mount", "-o", "remount,ro,bind", str(aside)], check=True)
            with mounted(run.journal, "--bind", str(aside)):
                assert node.wait(120) == 1, trials.tail(run)
            state = run.state()
            assert state.status == "failed" and "orchestrator" in state.reason
            assert str(run.journal) in state.reason and "ead-only" in state.reason, state.reason
    assert audit(run).as_json()["lost"] == []
    assert trials.live(run) == 1
    trials.check(run)
