"""A run on three nodes, which are three programs on three addresses of this machine: who does what where,
and what becomes of all when one of them goes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_roles import STACK, fresh_home, gone, wait_until

from stackrl.runtime import node
from stackrl.runtime.nodes.meeting import ports
from stackrl.runtime.place import Place
from stackrl.runtime.processes import LOST, descendants, send
from stackrl.runtime.run import RunError, RunFolder, all_runs

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-these-tests"
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NODE = """
import sys
from dataclasses import replace
from stackrl.runtime import node
from stackrl.runtime.launch.planning.plan import make_plan

engine, worker = sys.argv[2:4]
programs = {"engine": engine, "trainer": worker, "orchestrator": worker}
makes = "import pathlib, sys; p = pathlib.Path(sys.argv[1], 'model'); p.mkdir(); (p / 'w').write_text('1')"
prepare = [sys.executable, "-c", makes]

def planner(loaded):
    plan = make_plan(loaded)
    fakes = [replace(one, command=["-c", programs[one.role], "RUN", one.name]) for one in plan.processes]
    return replace(plan, processes=fakes)

sys.exit(node.main(sys.argv[1], planner=planner, prepare=prepare))
"""
"""The node program with small programs for its roles; everything else is the real thing."""
SAYS = """
import json, os, pathlib, sys, time
from stackrl.runtime import heartbeat
heartbeat.start()
run = pathlib.Path(sys.argv[1])
incarnation = json.loads((run / "state.json").read_bytes())["incarnation"]
ends = json.loads((run / "endpoints.json").read_bytes())
print(json.dumps({
    "folder": str(run), "pid": os.getpid(), "address": os.environ["STACKRL_ADDRESS"],
    "incarnation": incarnation, "ends": ends, "rank": os.environ.get("RANK"),
    "knows": len(os.environ["STACKRL_TOKEN"]), "model": (run / "model" / "w").read_text(),
}), flush=True)
"""
SERVES = SAYS + "time.sleep(600)"
WORKS = SAYS + "while not pathlib.Path(os.environ['OVER']).exists(): time.sleep(0.1)"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


class Nodes:
    """The programs of three nodes, with SkyPilot's variables or Slurm's."""

    def __init__(self, stack: Path, *, slurm: bool = False) -> None:
        self.stack, self._slurm = stack, slurm
        self._over = stack.with_name("over")
        self.programs: dict[int, subprocess.Popen[str]] = {}

    def start(self, *ranks: int, **variables: str) -> None:
        for rank in ranks:
            sky = {
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": "3",
                "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
                "SKYPILOT_TASK_ID": f"sky-{self.stack}",
                "STACKRL_METADATA": "http://127.0.0.1:9",
            }
            slurm = {
                "SLURM_PROCID": str(rank),
                "SLURM_JOB_ID": str(self.stack),
                "STACKRL_NODE_ADDRESSES": ",".join(ADDRESSES),
            }
            own = {"STACKRL_TOKEN": TOKEN, "OVER": str(self._over)}
            self.programs[rank] = subprocess.Popen(
                [sys.executable, "-c", NODE, str(self.stack), SERVES, WORKS],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(slurm if self._slurm else sky), **own, **variables},
            )

    def finish(self) -> None:
        """Let the workers do what is left of their work: nothing."""
        self._over.touch()

    def outputs(self) -> dict[int, str]:
        return {rank: program.communicate(timeout=90)[0] for rank, program in self.programs.items()}

    def codes(self) -> list[int]:
        return [self.programs[rank].returncode for rank in sorted(self.programs)]

    def end(self) -> None:
        for program in self.programs.values():
            if program.poll() is None:
                send(program.pid, signal.SIGTERM)
                send(program.pid, signal.SIGTERM)
        for program in self.programs.values():
            program.wait(60)


def stack_file(folder: Path, **changes: object) -> Path:
    """One node for the trainer, two for engines."""
    parts = STACK | {"roles": {"trainer": {"nodes": 1}, "inference": {"nodes": 2}}, "limits": {"restarts": 2}}
    file = folder / "three.yaml"
    task = {
        "name": "three",
        "num_nodes": 3,
        "workdir": ".",
        "envs": {"STACK": file.name},
        "secrets": {"STACKRL_TOKEN": None},
        "_metadata": {"stack": parts | changes},
    }
    file.write_text(json.dumps(task))
    return file


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(stack_file(tmp_path), **getattr(request, "param", {}))
    yield made
    made.end()


def said(run: RunFolder, name: str) -> list[dict]:
    """What the lives of a process have said of themselves, from its log on node 0."""
    log = run.logs(1) / f"{name}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def started(names: Sequence[str]) -> RunFolder:
    """The run once its processes have spoken."""

    def speaking() -> RunFolder | None:
        runs = all_runs()
        return runs[0] if runs and all(said(runs[0], name) for name in names) else None

    return wait_until(speaking, limit=120)


@pytest.mark.parametrize("nodes", [{}, {"slurm": True}], indirect=True)
def test_each_node_runs_its_roles_at_its_address_and_ends_with_the_run(nodes: Nodes) -> None:
    nodes.finish()
    nodes.start(2, 1)
    time.sleep(0.5)  # in any order
    nodes.start(0)
    outputs = nodes.outputs()
    assert nodes.codes() == [0, 0, 0], outputs
    (run,) = all_runs()
    assert run.state().status == "finished"
    found = {name: said(run, name) for name in ("orchestrator", "trainer-0", "engine-0", "engine-1")}
    assert {name: len(lives) for name, lives in found.items()} == dict.fromkeys(found, 1)
    [orchestrator], [trainer], [first], [second] = found.values()
    assert [one["address"] for one in (orchestrator, trainer, first, second)] == [
        *("127.0.0.1", "127.0.0.1"),
        *("127.0.0.2", "127.0.0.3"),
    ]
    assert orchestrator["folder"] == trainer["folder"] == str(run.path)
    assert len({str(run.path), first["folder"], second["folder"]}) == 3
    assert first["ends"] == second["ends"] == trainer["ends"]
    hosts = [url.removeprefix("http://").partition(":")[0] for url in trainer["ends"]["engines"]]
    assert hosts == ["127.0.0.2", "127.0.0.3"]
    assert trainer["ends"]["weights"].startswith("http://127.0.0.1:")
    assert {one["knows"] for one in (trainer, first, second)} == {len(TOKEN)}
    assert not any(TOKEN in output for output in outputs.values())
    assert not Path(first["folder"]).exists() and not Path(second["folder"]).exists()


def test_an_engine_on_another_node_is_started_again_there(nodes: Nodes) -> None:
    nodes.start(0, 1, 2)
    run = started(["engine-0", "engine-1", "trainer-0"])
    [first] = said(run, "engine-1")
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: len(said(run, "engine-1")) == 2, limit=60)
    nodes.finish()
    outputs = nodes.outputs()
    assert nodes.codes() == [0, 0, 0], outputs
    before, after = said(run, "engine-1")
    assert after["address"] == before["address"] == "127.0.0.3" and after["pid"] != before["pid"]
    assert after["ends"]["engines"] == before["ends"]["engines"]
    assert len(said(run, "trainer-0")) == 1
    restarted = [json.loads(line) for line in run.events.read_text().splitlines() if "restarted" in line]
    assert [(event["process"], "SIGKILL" in event["reason"]) for event in restarted] == [("engine-1", True)]


def test_a_stopped_process_of_another_node_is_found_there(nodes: Nodes, tmp_path: Path) -> None:
    nodes.stack = stack_file(tmp_path, limits={"restarts": 2, "silence_seconds": 5})
    nodes.start(0, 1, 2)
    run = started(["engine-0", "engine-1", "trainer-0"])
    [first] = said(run, "engine-0")
    os.kill(first["pid"], signal.SIGSTOP)
    wait_until(lambda: len(said(run, "engine-0")) == 2, limit=60)
    restarted = next(line for line in run.events.read_text().splitlines() if "restarted" in line)
    assert "engine-0 was silent" in restarted and "SIGSTOP" in restarted


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_node_ends_the_others_with_the_code_that_starts_them_again(nodes: Nodes, rank: int) -> None:
    nodes.start(0, 1, 2)
    run = started(["engine-0", "engine-1", "trainer-0", "orchestrator"])
    pids = [said(run, name)[0]["pid"] for name in ("engine-0", "engine-1", "trainer-0", "orchestrator")]
    lost = nodes.programs[rank]
    below = descendants(lost.pid)
    for pid in [lost.pid, *below]:
        send(pid, signal.SIGKILL)
    nodes.outputs()
    codes = nodes.codes()
    codes.pop(rank)
    assert codes == [LOST, LOST]
    wait_until(lambda: gone(*pids))
    if rank == 2:
        state = run.state()
        assert state.status == "stopped" and "node 2" in state.reason, state.reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_node_ends_all(nodes: Nodes, rank: int) -> None:
    nodes.start(0, 1, 2)
    run = started(["engine-0", "engine-1", "trainer-0"])
    pids = [said(run, name)[0]["pid"] for name in ("engine-0", "engine-1", "trainer-0")]
    nodes.programs[rank].send_signal(signal.SIGTERM)
    outputs = nodes.outputs()
    assert nodes.codes() == [1, 1, 1], outputs
    assert run.state().status == "stopped" and "SIGTERM" in run.state().reason
    assert gone(*pids)


def test_a_preemption_notice_at_any_node_stops_the_run(nodes: Nodes) -> None:
    nodes.start(0, 1, 2)
    run = started(["engine-0", "engine-1", "trainer-0"])
    Path(said(run, "engine-1")[0]["folder"], "preempt").touch()
    nodes.outputs()
    assert nodes.codes() == [LOST] * 3
    assert "node 2" in run.state().reason and "preemption" in run.state().reason


def test_nodes_that_do_not_fit_together_say_why_before_anything_starts(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start(0, 1)
    other = tmp_path / "other"
    other.mkdir()
    nodes.stack = stack_file(other, seed=7)
    nodes.start(2, SKYPILOT_TASK_ID=f"sky-{tmp_path / 'three.yaml'}")
    outputs = nodes.outputs()
    assert all(code == 1 for code in nodes.codes()), nodes.codes()
    assert all("node 2 has another stack file than node 0" in output for output in outputs.values()), outputs
    (run,) = all_runs()
    assert run.state().status == "failed" and not run.model.exists()


def test_a_stranger_at_the_meeting_is_refused(nodes: Nodes) -> None:
    nodes.finish()
    nodes.start(0, 1)
    place = Place(0, ADDRESSES)
    candidates = ports(place, {"SKYPILOT_TASK_ID": f"sky-{nodes.stack}"})

    def connected() -> socket.socket | None:
        for port in candidates:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=5)
            except OSError:
                continue
        return None

    with wait_until(connected) as stranger:
        stranger.settimeout(20)
        assert len(stranger.recv(64)) == 32  # a nonce, and nothing that helps
        stranger.sendall(bytes(64))
        assert stranger.recv(64) == b""
    nodes.start(2)
    outputs = nodes.outputs()
    assert nodes.codes() == [0, 0, 0], outputs
    assert "does not know the run's token" in outputs[0]


def test_a_node_that_comes_late_keeps_nobody_from_waiting(nodes: Nodes) -> None:
    """Node 0 gives signs of life meanwhile, which are not yet the welcome."""
    nodes.finish()
    nodes.start(0, 1)
    wait_until(lambda: all_runs() and "waiting for" in (all_runs()[0].logs(1) / "node.log").read_text())
    time.sleep(2)
    nodes.start(2)
    outputs = nodes.outputs()
    assert nodes.codes() == [0, 0, 0], outputs


def test_the_job_of_a_finished_run_ends_at_once_on_all_nodes(nodes: Nodes) -> None:
    nodes.finish()
    nodes.start(0, 1, 2, STACKRL_RUN="again")
    assert (nodes.outputs(), nodes.codes())[1] == [0, 0, 0]
    nodes.start(0, 1, 2, STACKRL_RUN="again")
    outputs = nodes.outputs()
    assert nodes.codes() == [0, 0, 0], outputs
    (run,) = all_runs()
    assert run.state().attempt == 1 and len(said(run, "trainer-0")) == 1


def test_what_node_0_refuses_is_told_to_all(nodes: Nodes, tmp_path: Path) -> None:
    nodes.stack = stack_file(tmp_path)
    task = json.loads(nodes.stack.read_text())
    nodes.stack.write_text(json.dumps(task | {"service": {"replicas": 1}}))
    nodes.start(0, 1, 2)
    outputs = nodes.outputs()
    assert 0 not in nodes.codes()
    assert all("this part of SkyPilot is not used by a run" in output for output in outputs.values()), outputs


def test_a_run_folder_of_another_number_of_nodes_is_refused(nodes: Nodes) -> None:
    nodes.finish()
    nodes.start(0, 1, 2)
    nodes.outputs()
    (run,) = all_runs()
    with pytest.raises(RunError, match="planned for 3 node"):
        node.main(str(run.path))


def test_several_nodes_without_a_token_do_not_start(nodes: Nodes) -> None:
    nodes.start(0, STACKRL_TOKEN="")
    [output] = nodes.outputs().values()
    assert nodes.codes() == [1] and "openssl rand" in output
    assert all_runs() == []
