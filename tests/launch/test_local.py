"""`stackrl launch` on this machine, with small programs as roles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_roles import FAILS, SERVES, WORKS, fresh_home, make_run, process, task_file, wait_until

from stackrl.runtime.launch import devices, local, runs
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.planning.plan import Machine
from stackrl.runtime.run import RunError, RunFolder, all_runs
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

LEARNS = """
import sys, time
from stackrl.runtime.monitor.metrics import open_sinks
from stackrl.runtime.run import RunFolder
run = RunFolder(sys.argv[1])
with open_sinks(run, run.stack()) as sink:
    for step in range(60):
        facts = {"stage": "main", "stage_step": step, "stage_steps": 60, "index": 20 + step, "step": step}
        sink.log({"kind": "rl", **facts, "reward": 0.3 + step / 100, "seconds_step": 0.01})
    for when, reward in (("before", 0.25), ("after", 0.75)):
        greedy = {"greedy_reward": reward, "greedy_exact": 0.5}
        sink.event("evaluated", stage="main", when=when, reward=reward, exact=0.5, **greedy)
"""
"""An orchestrator that only writes what one would write."""
MINDS_CTRL_C = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the tests may have it ignored
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "devices")
    with fresh_home(tmp_path, monkeypatch):
        yield


def learning_run() -> RunFolder:
    run = make_run()
    run.write("plan.json", {"processes": [process("engine", SERVES), process("orchestrator", LEARNS, "RUN")]})
    return run


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stackrl", "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_run_is_shown_to_its_end_and_its_gain_and_model_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    run = learning_run()
    assert local.launch(None, detach=False, resume=run.id) == 0
    out, err = capfd.readouterr()
    assert out.strip() == str(run.final)
    assert "main 1/60" in err and "main 60/60" in err
    assert f"run {run.id} finished" in err
    assert "reward 0.345 → 0.845 over its first" in err
    assert "reward 0.250 → 0.750" in err and "held-out" not in err


@pytest.mark.slow
def test_a_failed_run_tells_who_failed_and_what_to_type(capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(process("engine", SERVES), process("trainer", FAILS))
    assert local.launch(None, detach=False, resume=run.id) == 1
    err = capfd.readouterr().err
    assert "trainer-0 ended with exit code 1: the disk is full" in err
    assert "so far so good" in err and str(run.logs(1) / "trainer-0.log") in err
    assert f"stackrl logs {run.id}" in err and f"stackrl launch --resume {run.id}" in err


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_what_it_started(tmp_path: Path) -> None:
    run = make_run(process("engine", SERVES), process("orchestrator", SERVES))
    launched = start("--resume", run.id)
    wait_until(lambda: run.state().status == "running")
    launched.send_signal(signal.SIGINT)
    _, err = launched.communicate(timeout=40)
    assert launched.returncode == 130, err
    assert run.state().status == "stopped" and run.keeper() is None
    assert run.state().roles == {"engine-0": "ended", "orchestrator": "ended"}
    assert "--resume" in err and "Traceback" not in err


@pytest.mark.slow
def test_a_detached_run_goes_on_and_says_how_to_watch_and_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(process("orchestrator", SERVES))
    assert local.launch(None, detach=True, resume=run.id) == 0
    out, err = capfd.readouterr()
    assert out.strip() == run.id
    assert f"stackrl down {run.id}" in err and f"stackrl watch {run.id}" in err
    assert run.keeper() is not None
    with pytest.raises(RunError, match="is running"):
        local.launch(None, detach=True, resume=run.id)


@pytest.mark.slow
def test_a_resumed_run_is_a_new_attempt_of_the_same_run(capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(process("orchestrator", FAILS))
    assert local.launch(None, detach=False, resume="latest") == 1
    run.write("plan.json", {"processes": [process("orchestrator", WORKS)]})
    assert local.launch(None, detach=False, resume="latest") == 0
    state = run.state()
    assert (state.attempt, state.incarnation, state.status, state.reason) == (2, 2, "finished", "")
    assert len(all_runs()) == 1
    with pytest.raises(RunError, match="is finished"):
        local.launch(None, detach=False, resume=run.id)


@pytest.mark.slow
def test_a_node_program_that_cannot_start_is_told_with_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    run.write("plan.json", {"processes": [{"role": "a role of another version"}]})
    for detach in (False, True):
        assert local.launch(None, detach=detach, resume=run.id) == 1
        err = capfd.readouterr().err
        assert "did not start" in err and "TypeError" in err and "stackrl doctor" in err


def test_a_new_run_has_its_folder_with_stack_plan_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_start_node", lambda run, claims: subprocess.Popen(["true"]))
    loaded = load(task_file(tmp_path), ["stages.main.steps=7"])
    assert local.launch(loaded, detach=True, resume=None) == 1  # `true` is no node program
    (run,) = all_runs()
    assert (run.path / "source.yaml").read_text() == loaded.path.read_text()
    assert run.stack() == loaded.stack.model_copy(update={"device": "cpu"})
    assert run.stack().stages[-1].steps == 7
    roles = [process["role"] for process in run.read("plan.json")["processes"]]
    assert sorted(roles) == ["engine", "orchestrator", "trainer"]
    assert run.read("run.json")["hash"] == loaded.hash
    assert os.stat(run.path).st_mode & 0o777 == 0o700


def test_a_resumed_run_takes_the_stack_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_start_node", lambda run, claims: subprocess.Popen(["true"]))
    run = make_run()
    loaded = load(task_file(tmp_path), ["roles.trainer.processes=2"])
    local.launch(loaded, detach=True, resume=run.id)
    assert run.stack().roles.trainer.processes == 2
    assert [process["role"] for process in run.read("plan.json")["processes"]].count("trainer") == 2


def test_a_resumed_run_keeps_the_file_and_the_environment_that_it_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_start_node", lambda run, claims: subprocess.Popen(["true"]))
    run = make_run()
    file = task_file(tmp_path)
    file.write_text(file.read_text().replace("STACK: fake.yaml", "STACK: fake.yaml\n  MODE: '7'"))
    loaded = load(file)
    local.launch(loaded, detach=True, resume=run.id)
    about = run.read("run.json")
    assert (run.path / "source.yaml").read_text() == file.read_text()
    assert (about["source"], about["hash"], about["id"]) == (str(file), loaded.hash, run.id)
    assert about["environment"]["MODE"] == "7" and about["made"]


def test_a_run_does_not_go_on_with_another_model_or_seed(tmp_path: Path) -> None:
    run = make_run()
    before = {name: (run.path / name).read_bytes() for name in ("stack.json", "run.json", "source.yaml")}
    with pytest.raises(StackError, match=r"--set seed: the run was made with 0; put it back"):
        local.launch(load(task_file(tmp_path), ["seed=1"]), detach=True, resume=run.id)
    assert all((run.path / name).read_bytes() == content for name, content in before.items())


def test_a_node_program_that_is_killed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = (
        "import os, sys; from stackrl.runtime.run import RunFolder, State;"
        "RunFolder(sys.argv[1]).write_state(State('running', attempt=1)); os.kill(os.getpid(), 9)"
    )
    monkeypatch.setattr(
        local,
        "_start_node",
        lambda run, claims: subprocess.Popen([sys.executable, "-c", dies, str(run.path)]),
    )
    run = make_run()
    assert local.launch(None, detach=False, resume=run.id) == 1
    assert f"run {run.id} died" in capfd.readouterr().err


def test_ctrl_c_while_a_detached_run_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[subprocess.Popen[bytes]] = []

    def start(run: RunFolder, claims: object) -> subprocess.Popen[bytes]:
        nodes.append(subprocess.Popen([sys.executable, "-c", MINDS_CTRL_C], stdout=subprocess.PIPE))
        nodes[0].stdout.readline()
        return nodes[0]

    monkeypatch.setattr(local, "_start_node", start)
    slept: list[float] = []

    def interrupted(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            raise KeyboardInterrupt

    run = make_run()
    monkeypatch.setattr(local.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local.launch(None, detach=True, resume=run.id)
    assert nodes[0].returncode == -signal.SIGINT
    nodes[0].stdout.close()


def test_a_bad_token_is_told_before_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_TOKEN", "short")
    with pytest.raises(RunError, match="16 or more"):
        local.launch(load(task_file(tmp_path)), detach=False, resume=None)
    assert all_runs() == []


def test_what_the_runtime_cannot_do_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    file = task_file(tmp_path)
    file.write_text(file.read_text() + "service: {replicas: 1}\n")
    with pytest.raises(StackError, match="service: this part of SkyPilot is not used"):
        local.launch(load(file), detach=False, resume=None)
    assert all_runs() == []


def test_files_that_nobody_would_bring_here_are_refused(tmp_path: Path) -> None:
    file = task_file(tmp_path)
    file.write_text(file.read_text() + "file_mounts: {/data: s3://bucket/data}\n")
    with pytest.raises(StackError, match=r"fake\.yaml:\d+:1: file_mounts: nothing is mounted"):
        local.launch(load(file), detach=False, resume=None)
    assert all_runs() == []


def test_the_tasks_environment_reaches_the_node_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = task_file(tmp_path)
    file.write_text(file.read_text().replace("STACK: fake.yaml", "STACK: fake.yaml\n  MODE: '7'"))
    started: list[dict[str, str]] = []
    node = SimpleNamespace(
        Popen=lambda command, **how: started.append(how["env"]) or SimpleNamespace(poll=int),
        DEVNULL=subprocess.DEVNULL,
        STDOUT=subprocess.STDOUT,
    )
    monkeypatch.setattr(local, "subprocess", node)
    local.launch(load(file), detach=True, resume=None)
    assert started[0]["MODE"] == "7" and started[0]["PATH"] == os.environ["PATH"]


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_is_shown() -> None:
    run = learning_run()
    launched = start("--resume", run.id)
    assert launched.stderr is not None
    launched.stderr.close()
    assert launched.wait(60) == 0
    assert run.state().status == "finished"


def test_a_home_that_cannot_hold_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError, match=r"file/runs cannot hold runs .*set STACKRL_HOME"):
        local.launch(load(task_file(tmp_path)), detach=False, resume=None)


@pytest.mark.slow
def test_a_run_holds_its_cores_until_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    run, other = make_run(), make_run()
    for made in (run, other):
        made.write("plan.json", {"device": "cpu", "processes": [process("trainer", SERVES)]})
    assert local.launch(None, detach=True, resume=run.id) == 0
    core = f"core-{min(os.sched_getaffinity(0))}"
    with devices.Claims() as claims:
        assert claims.take(core) == f"run {run.id}"
    capfd.readouterr()
    assert local.launch(None, detach=True, resume=other.id) == 0
    assert f"note: cores are shared with other runs, so all are slower: run {run.id} has 0" in (
        capfd.readouterr().err
    )
    assert runs.down(run.id) == 0
    with devices.Claims() as claims:
        assert claims.take(core) is None


def test_a_run_that_is_refused_gpus_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine((0,), 2)))
    monkeypatch.setattr(devices, "gpus_here", lambda environment: [devices.Gpu(0), devices.Gpu(1)])
    file = task_file(tmp_path, roles={"trainer": {"gpus": 1}, "inference": {"gpus": 1}})
    file.write_text(file.read_text() + "resources: {accelerators: 'H100:2'}\n")
    with devices.Claims() as claims:
        claims.take("gpu-1")
        claims.sign("math-1")
        with pytest.raises(RunError, match="too few are free: run math-1 has 1"):
            local.launch(load(file), detach=False, resume=None)
    assert all_runs() == []


def test_a_launch_notes_who_carries_the_run_and_its_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_start_node", lambda run, claims: subprocess.Popen(["true"]))
    file = task_file(tmp_path)
    local.launch(load(file), detach=True, resume=None)
    assert Handle.of(all_runs()[0]).hourly == 0.0 and Handle.of(all_runs()[0]).submitted > 0
    file.write_text(file.read_text().replace("STACK: fake.yaml", "STACK: fake.yaml\n  STACKRL_HOURLY: 1.5"))
    local.launch(load(file), detach=True, resume=all_runs()[0].id)
    assert Handle.of(all_runs()[0]).hourly == 1.5
