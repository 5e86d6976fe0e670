"""`stackrl scale` on a run of small programs: engines leave and join, and that outlives the node program."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import BEATS, fresh_home, gone, make_run, process, start_node, wait_until

from stackrl.runtime.launch import scaling
from stackrl.runtime.launch.runs import explain, status
from stackrl.runtime.run import RunError, RunFolder

pytestmark = pytest.mark.slow

ENGINE = """
import os, sys, time
from stackrl.runtime.run import RunFolder
run, number = RunFolder(sys.argv[1]), int(sys.argv[3])
url = run.endpoints().engines[number]
with open(run.path / f"engine-{number}", "a") as book:
    book.write(f"{os.getpid()} {url}\\n")
time.sleep(600)
"""
ORCHESTRATOR = (
    BEATS
    + """
from stackrl.runtime.run import RunFolder
run = RunFolder(sys.argv[1])
while not (run.path / "done").exists():
    used = list(run.endpoints().members)
    if (run.path / "clings").exists():
        used += (run.path / "clings").read_text().split()
    heartbeat.note("working", engines=used)
    time.sleep(0.1)
"""
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def make() -> RunFolder:
    engines = [
        process("engine", ENGINE, "RUN", "--engine", str(index), index=index) | {"pool": "inference"}
        for index in range(2)
    ]
    return make_run(*engines, process("orchestrator", ORCHESTRATOR, "RUN"), restarts=5, silence_seconds=30.0)


def lives(run: RunFolder, number: int) -> list[tuple[int, str]]:
    """Pid and URL of each life of an engine."""
    book = (run.path / f"engine-{number}").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in book]


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def test_down_to_one_and_up_to_two(capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    node = start_node(run)
    pids = wait_until(lambda: [lives(run, number)[0][0] for number in range(2)])
    leaving = lives(run, 1)[0][1]
    (run.path / "clings").write_text(leaving)

    assert scaling.scale(run.id, ["inference=1"]) == 0
    assert "inference 2 → 1 engines; engine-1 leaves: its rollouts go on elsewhere" in capsys.readouterr().err
    assert run.endpoints().members == {lives(run, 0)[0][1]: "inference"}
    assert not gone(pids[1]), "it goes when the orchestrator has let go of it"
    (run.path / "clings").unlink()
    wait_until(lambda: gone(pids[1]))
    wait_until(lambda: run.state().roles["engine-1"] == "ended")
    assert run.state().roles["engine-0"] == "running" and not events(run, "restarted")
    [event] = events(run, "scaled")
    assert (event["pool"], event["before"], event["after"], event["leaves"]) == (
        "inference",
        2,
        1,
        ["engine-1"],
    )

    assert scaling.scale(run.id, ["inference=2"]) == 0
    assert "engine-1 starts and takes rollouts when it holds" in capsys.readouterr().err
    wait_until(lambda: len(lives(run, 1)) == 2)
    assert lives(run, 1)[1][1] != leaving and list(run.endpoints().members) == [
        lives(run, 0)[0][1],
        lives(run, 1)[1][1],
    ]
    os.kill(lives(run, 1)[1][0], signal.SIGKILL)
    wait_until(lambda: len(lives(run, 1)) == 3)
    assert lives(run, 1)[2][1] == lives(run, 1)[1][1], "it is started again like any other"
    assert [event["process"] for event in events(run, "restarted")] == ["engine-1"]
    status(run.id, "text")
    assert "engine-1" in capsys.readouterr().out
    (run.path / "done").touch()
    assert node.wait(60) == 0, explain(run)
    assert len(lives(run, 0)) == 1


@pytest.mark.nightly
def test_a_count_outlives_the_node_program() -> None:
    run = make()
    node = start_node(run)
    wait_until(lambda: lives(run, 1))
    scaling.scale(run.id, ["inference=1"])
    wait_until(lambda: run.state().roles.get("engine-1") == "ended")
    node.kill()
    node.wait(60)
    wait_until(lambda: run.keeper() is None)
    again = start_node(run)
    wait_until(lambda: len(lives(run, 0)) == 2)
    (run.path / "done").touch()
    assert again.wait(60) == 0, explain(run)
    assert len(lives(run, 1)) == 1 and "engine-1" not in run.state().roles


def test_what_cannot_be_is_refused_and_nothing_changes() -> None:
    run = make()
    with pytest.raises(RunError, match=r"is not running; .*--set roles.inference.processes=3"):
        scaling.scale(run.id, ["inference=3"])
    node = start_node(run)
    wait_until(lambda: lives(run, 1))
    plan = run.read("plan.json")
    with pytest.raises(RunError, match="was not changed: the run has no pool decode; it has inference"):
        scaling.scale(run.id, ["inference=1", "decode=2"])
    assert run.read("plan.json") == plan and len(run.endpoints().members) == 2
    (run.path / "done").touch()
    assert node.wait(60) == 0


@pytest.mark.nightly
def test_who_dies_while_it_leaves_is_not_started_again() -> None:
    run = make()
    node = start_node(run)
    pid, url = wait_until(lambda: lives(run, 1))[0]
    (run.path / "clings").write_text(url)
    scaling.scale(run.id, ["inference=1"])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid))
    (run.path / "clings").unlink()
    (run.path / "done").touch()
    assert node.wait(60) == 0, explain(run)
    assert len(lives(run, 1)) == 1 and run.state().status == "finished"
