"""Save, then stop: signals, preemption notices and the hours of a run, with small programs as roles."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import BEATS, SERVES, fresh_home, make_run, process, start_node, wait_until
from forked import Started
from small_runs import lines

from stackrl.runtime.launch.runs import explain
from stackrl.runtime.run import RunFolder

pytestmark = pytest.mark.slow

SAVES = (
    BEATS
    + """
folder = pathlib.Path(sys.argv[1])
def save(*received):
    time.sleep({seconds})
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGUSR2, save)
heartbeat.note("step 5", index={index}, checkpoint={checkpoint})
time.sleep(600)
"""
)
"""An orchestrator that knows how to save."""
TRAINS = """
import pathlib, sys, time
while not (pathlib.Path(sys.argv[1]) / "saved").exists(): time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def training_run(index: int = 5, checkpoint: int = 3, seconds: float = 0.5, **limits: Any) -> RunFolder:
    saves = SAVES.format(index=index, checkpoint=checkpoint, seconds=seconds)
    return make_run(
        process("engine", SERVES),
        process("trainer", TRAINS, "RUN"),
        process("orchestrator", saves, "RUN"),
        **limits,
    )


def start(run: RunFolder, **environment: str) -> Started:
    """A node whose orchestrator has said how far it is."""
    node = start_node(run, **environment)
    wait_until(lambda: any("step 5" in file.read_text() for file in run.path.glob("heartbeats/orch*")))
    return node


def end(node: Started) -> tuple[int, str]:
    output, _ = node.communicate(timeout=40)
    return node.returncode, output


def stopping(run: RunFolder) -> dict[str, Any]:
    [event] = [json.loads(line) for line in run.events.read_text().splitlines()]
    return event


def test_a_run_that_a_guard_stopped_says_which_and_how_to_go_on_otherwise() -> None:
    stops = "import sys, time; time.sleep(1); print('error: guard mismatch: too much'); sys.exit(3)"
    run = make_run(process("engine", SERVES), process("orchestrator", stops), restarts=3)
    code, _ = end(start_node(run))
    state = run.state()
    assert (code, state.status, state.reason) == (1, "stopped", "guard mismatch: too much")
    assert f"stackrl launch --from {run.id}@latest --set" in explain(run) and "--resume" not in explain(run)
    assert not any(event["event"] == "restarted" for event in lines(run.events))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_run_is_saved_before_it_is_stopped(number: int, code: int) -> None:
    run = training_run()
    node = start(run)
    node.send_signal(number)
    assert end(node)[0] == code
    state, name = run.state(), signal.Signals(number).name
    assert (run.path / "saved").exists()
    assert (state.status, state.reason) == ("stopped", f"stopped by {name}")
    assert state.roles == {"engine-0": "ended", "trainer-0": "done", "orchestrator": "done"}
    event = stopping(run)
    assert (event["event"], event["reason"], event["saves"]) == ("stopping", f"stopped by {name}", True)


def test_nothing_is_saved_where_nothing_was_trained_since_the_last_checkpoint() -> None:
    run = training_run(index=5, checkpoint=5)
    node = start(run)
    node.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert end(node)[0] == 1
    assert not (run.path / "saved").exists() and time.monotonic() - began < 20
    assert run.state().roles["orchestrator"] == "ended" and stopping(run)["saves"] is False


def test_a_second_signal_does_not_wait_for_the_checkpoint() -> None:
    run = training_run(seconds=60)
    node = start(run)
    node.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert node.poll() is None
    node.send_signal(signal.SIGTERM)
    node.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert end(node)[0] == 1
    assert time.monotonic() - began < 20 and not (run.path / "saved").exists()
    assert run.state().status == "stopped"


def test_a_checkpoint_that_takes_too_long_is_given_up() -> None:
    run = training_run(seconds=60, stop_seconds=2.0)
    node = start(run)
    node.send_signal(signal.SIGTERM)
    assert end(node)[0] == 1
    log = (run.logs(1) / "node.log").read_text()
    assert "no checkpoint was made within 2 s (limits.stop_seconds): step 5" in log
    assert run.state().status == "stopped"


def test_a_trainer_that_dies_while_the_run_is_saved_does_not_keep_it() -> None:
    run = training_run(seconds=60)
    node = start(run)
    node.send_signal(signal.SIGTERM)
    wait_until(run.events.exists)
    for pid in pids_of("trainer-0", run):
        os.kill(pid, signal.SIGKILL)
    assert end(node)[0] == 1
    assert "not saved: trainer-0 was killed by SIGKILL" in (run.logs(1) / "node.log").read_text()


def pids_of(name: str, run: RunFolder) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        beats = f"STACKRL_HEARTBEATS={run.heartbeats}".encode()
        if f"STACKRL_PROCESS={name}".encode() in environment and beats in environment:
            found.append(int(entry.name))
    return found


def test_a_notice_of_preemption_saves_and_asks_to_be_started_again() -> None:
    run = training_run()
    node = start(run)
    run.preempt.touch()
    assert end(node)[0] == 75
    state = run.state()
    assert (run.path / "saved").exists() and state.status == "stopped"
    assert state.reason == "the machine is being taken away (preemption notice)"


def test_starts_that_are_taken_away_before_they_achieve_anything_are_not_repeated_for_ever() -> None:
    run = make_run(process("orchestrator", "import time; time.sleep(60)"))
    codes = []
    for attempt in range(1, 7):
        node = start_node(run)
        wait_until(lambda: run.state().attempt == attempt and run.state().status == "running")  # noqa: B023
        run.preempt.touch()
        codes.append(end(node)[0])
    assert codes == [75] * 5 + [1]
    state = run.state()
    assert state.status == "failed" and "6 starts in a row" in state.reason and state.fruitless == 0


def test_an_old_notice_does_not_stop_the_next_attempt() -> None:
    run = make_run(process("orchestrator", "import time; time.sleep(2)"))
    run.preempt.touch()
    node = start_node(run)
    assert end(node)[0] == 0 and not run.preempt.exists()


def test_the_hours_of_all_attempts_together_stop_a_run() -> None:
    run = training_run(hours=8 / 3600)
    node = start(run)
    node.send_signal(signal.SIGTERM)
    assert end(node)[0] == 1
    used = run.state().used
    assert 0.5 < used < 8
    (run.path / "saved").unlink()
    assert end(start_node(run))[0] == 1
    state = run.state()
    assert (run.path / "saved").exists()
    assert state.reason == "stopped after 0.00222222 h of work, its limit (limits.hours)"
    assert state.ended is not None and state.ended - state.began < 8 - used + 3
    code, output = end(start_node(run))
    assert code != 0 and run.state().attempt == 2
    assert "(limits.hours)" in output and f"--resume {run.id} --set limits.hours=" in output
