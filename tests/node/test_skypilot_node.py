"""`stackrl node STACK` as SkyPilot runs it: a stack file, and variables that say where this node stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import SERVES, WORKS, fresh_home, task_file, wait_until
from skypilot_variables import ONE_NODE

from stackrl.runtime.place import Place
from stackrl.runtime.run import RunError, all_runs

PROGRAM = f"""
import sys
from dataclasses import replace
from stackrl.runtime import node
from stackrl.runtime.launch.planning.plan import make_plan

programs = {{"engine": {SERVES!r}, "trainer": {WORKS!r}, "orchestrator": sys.argv[2]}}
makes = "import pathlib, sys; pathlib.Path(sys.argv[1], 'model').mkdir(); print('made')"
prepare = [sys.executable, "-c", makes]

def planner(loaded):
    plan = make_plan(loaded)
    fakes = [replace(process, command=["-c", programs[process.role], "RUN"]) for process in plan.processes]
    return replace(plan, processes=fakes)

sys.exit(node.main(sys.argv[1], planner=planner, prepare=prepare))
"""
"""The node program with small programs for its roles; everything else is the real thing."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def start(stack: Path, orchestrator: str = WORKS, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(stack), orchestrator],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ONE_NODE, **variables},
    )


@pytest.mark.slow
def test_one_node_makes_its_run_does_it_and_shows_the_output_of_every_role(tmp_path: Path) -> None:
    node = start(task_file(tmp_path))
    output, _ = node.communicate(timeout=60)
    assert node.returncode == 0, output
    (run,) = all_runs()
    assert run.state().status == "finished"
    assert run.stack().device == "cpu"
    lines = output.splitlines()
    for line in ("prepare      | made", "trainer-0    | working", "orchestrator | working"):
        assert line in lines
    assert lines[-1].startswith(f"node         | run {run.id} finished")
    assert (run.logs(1) / "trainer-0.log").read_text() == "working\n"


@pytest.mark.slow
def test_another_count_of_nodes_than_the_stack_says_is_an_error(tmp_path: Path) -> None:
    node = start(task_file(tmp_path), SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8")
    output, _ = node.communicate(timeout=60)
    assert node.returncode != 0
    assert "num_nodes: 1" in output and "2 node(s)" in output
    assert all_runs() == []


@pytest.mark.slow
def test_the_end_that_sky_cancel_brings_ends_the_run(tmp_path: Path) -> None:
    node = start(task_file(tmp_path), SERVES)
    (run,) = wait_until(all_runs)
    wait_until(lambda: run.state().status == "running")
    node.send_signal(signal.SIGTERM)
    output, _ = node.communicate(timeout=30)
    assert node.returncode == 1 and run.state().status == "stopped"
    assert "--resume" in output


def test_place_among_nodes() -> None:
    assert Place.of({}) == Place(0, ("127.0.0.1",))
    two = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n"}
    assert Place.of(two) == Place(1, ("10.0.0.7", "10.0.0.8")) and Place.of(two).nodes == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SKYPILOT_NUM_NODES": "2"}, "lists 1 addresses"),
        ({"SKYPILOT_NUM_NODES": "one"}, "SKYPILOT_NUM_NODES is 'one'"),
        ({"SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_RANK is 1"),
    ],
)
def test_variables_that_disagree_are_errors(change: dict[str, str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        Place.of(ONE_NODE | change)


@pytest.mark.slow
def test_machines_of_different_kinds_are_refused_with_what_to_type(tmp_path: Path) -> None:
    roles = {
        "trainer": {"nodes": 1, "resources": {"accelerators": "B200:8"}},
        "inference": {"nodes": 1, "resources": {"accelerators": "H100:8"}},
    }
    file = task_file(tmp_path, num_nodes=2, roles=roles)
    text = file.read_text() + "secrets: {STACKRL_TOKEN: null}\n"
    file.write_text(text)
    node = start(file, SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8")
    output, _ = node.communicate(timeout=60)
    assert node.returncode != 0
    assert "--infra k8s" in output and "machines of their own kind" in output
    assert all_runs() == []
