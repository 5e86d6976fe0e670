"""The backend that asks SkyPilot: what it asks, and what it makes of the answers.

A small program stands in for `sky`: it notes how it is called and answers from a file. As the real one, it
ends with 0 also where `down` fails, and `jobs cancel` only tells a job to end. Another one stands in for
`ssh`: it runs the script here, in the home folder of a node.
"""

from __future__ import annotations

import fcntl
import json
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_roles import fresh_home

import stacks
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.sky import command as sky_command
from stackrl.runtime.launch.sky import machines
from stackrl.runtime.launch.sky.backend import BACKEND
from stackrl.runtime.run import RunError, all_runs, find_run
from stackrl.schemas.loader import load

SKY = """
import json, os, pathlib, signal, sys, time

here, line = pathlib.Path(__file__).parent, " ".join(sys.argv[1:])
with open(here / "calls", "a") as calls:
    secrets = {name: os.environ[name] for name in ("HF_TOKEN", "STACKRL_TOKEN") if name in os.environ}
    calls.write(json.dumps({"arguments": sys.argv[1:], "secrets": secrets}) + "\\n")
answers = json.loads((here / "answers").read_text())
if "launch" in sys.argv:
    answers = json.loads(json.dumps(answers).replace("NAME", sys.argv[sys.argv.index("launch") + 2]))
answer = next((answer for words, answer in answers.items() if line.startswith(words)), {})
said = answer.get("says", "")
if answer.get("later"):
    answer["later"], said = answer["later"] - 1, []
print(said if isinstance(said, str) else json.dumps(said))
jobs = answers.get("jobs queue", {})
for job in jobs.get("says", []):
    if line.startswith("jobs queue") and job["status"] == "CANCELLING":  # it has ended by the next question
        job["status"] = jobs.get("becomes", "CANCELLED")
    if line.startswith("jobs cancel") and not answer and job["job_name"] == sys.argv[4]:
        job["status"] = "CANCELLING"
if line.startswith("down") and not answer and "status" in answers:
    answers["status"]["says"] = [one for one in answers["status"]["says"] if one["name"] != sys.argv[2]]
(here / "answers").write_text(json.dumps(answers))
if answer.get("interrupts"):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.3)
sys.exit(answer.get("code", 0))
"""
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
echo "$1" >> {here}/hosts
HOME={home} exec bash -c "$2"
"""
CLUSTER = {"status": "UP", "cloud": "AWS", "region": "us-east-1"}


class Outside:
    """The stand-ins, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "node"
        self.home.mkdir()
        programs = {"sky": f"#!{sys.executable}{SKY}", "ssh": SSH.format(here=folder, home=self.home)}
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        self.answer()

    def answer(self, **answers: object) -> None:
        """What `sky` says to what begins with these words: clusters, jobs. NAME becomes what is launched."""
        self.answers = {
            words.replace("_", " "): {"says": says} for words, says in answers.items() if says is not None
        }
        self._keep()

    def refuse(self, words: str, says: str, code: int = 1) -> None:
        self.answers = {words: {"says": says, "code": code}, **self.answers}
        self._keep()

    def does(self, words: str, **how: object) -> None:
        """How: `later`, after so many questions; what a cancelled job `becomes`; it `interrupts` us."""
        self.answers[words] = {"says": "", **self.answers.get(words, {}), **how}
        self._keep()

    def _keep(self) -> None:
        (self.folder / "answers").write_text(json.dumps(self.answers))

    @property
    def calls(self) -> list[dict]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def asked(self, words: str) -> list[list[str]]:
        return [call["arguments"] for call in self.calls if " ".join(call["arguments"]).startswith(words)]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    folder = tmp_path / "outside"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_TOKEN", "STACKRL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machines, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(machines, "COME_LIMIT", 1.0)
    monkeypatch.setattr(machines, "GONE_LIMITS", {"cluster": 0.5, "job": 1.0})
    with fresh_home(tmp_path, monkeypatch):
        yield Outside(folder)


def stack(folder, *changes):
    return load(stacks.write(folder, *changes))


WITH_SECRET = ("workdir: .\n", "workdir: .\nsecrets: {HF_TOKEN: null, STACKRL_TOKEN: null}\n")
SPOT = ("num_nodes: 1\n", "num_nodes: 1\nresources: {infra: aws, cpus: 4+, use_spot: true}\n")


def launched(folder, infra="aws", *changes):
    assert BACKEND.launch(stack(folder, *changes), infra, detach=True) == 0
    run = find_run("latest")
    return run, Handle.of(run)


def test_a_cluster_is_launched_and_secrets_travel_in_the_environment(tmp_path, outside, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_of_mine")
    run, handle = launched(tmp_path, "aws", WITH_SECRET)
    assert capsys.readouterr().out.splitlines()[-1] == run.id
    [call] = outside.calls
    name = handle.job
    assert call["arguments"] == [
        *("launch", "-c", name, "-y", "-d", "--secret", "HF_TOKEN", "--secret", "STACKRL_TOKEN"),
        str(run.path / "sky.yaml"),
    ]
    token = call["secrets"]["STACKRL_TOKEN"]
    assert call["secrets"]["HF_TOKEN"] == "hf_of_mine" and len(token) >= 16
    for file in run.path.rglob("*"):
        if file.is_file():
            assert "hf_of_mine" not in file.read_text() and token not in file.read_text()
    assert (handle.backend, handle.details["infra"]) == ("sky", "aws")


@pytest.mark.parametrize(
    "change", [SPOT, (SPOT[0], SPOT[1].replace("use_spot: true", "job_recovery: FAILOVER"))]
)
def test_machines_that_may_go_are_minded_by_skypilot(tmp_path, outside, change):
    _, handle = launched(tmp_path, "sky", change)
    assert outside.calls[0]["arguments"][:4] == ["jobs", "launch", "-n", handle.job]


def test_a_secret_that_nobody_gives_is_told_before_anything_starts(tmp_path, outside):
    with pytest.raises(RunError, match="export HF_TOKEN="):
        BACKEND.launch(stack(tmp_path, WITH_SECRET), "aws", detach=True)
    assert outside.calls == [] and all_runs() == []


FAILED_DOWN = "Terminating cluster NAME...failed.\nReason: PermissionError: not yours."


def test_a_launch_that_fails_gives_back_what_it_got(tmp_path, outside, capfd):
    outside.answer(status=[{"name": "NAME", **CLUSTER}])
    outside.refuse("launch", "ResourcesUnavailableError: no machines")
    assert BACKEND.launch(stack(tmp_path), "aws", detach=True) == 1
    assert len(outside.asked("down")) == 1
    assert "no machines" in capfd.readouterr().err
    assert all_runs() == []


def test_a_launch_that_fails_and_leaves_machines_stays_listed(tmp_path, outside, capfd):
    outside.answer(status=[{"name": "NAME", **CLUSTER}])
    outside.refuse("launch", "no machines")
    outside.refuse("down", FAILED_DOWN, code=0)
    assert BACKEND.launch(stack(tmp_path), "aws", detach=True) == 1
    [run] = all_runs()
    told = capfd.readouterr().err
    assert "not yours" in told and f"stackrl down {run.id}" in told


@pytest.mark.parametrize(
    ("change", "words", "listed"),
    [
        (("num_nodes: 1\n", "num_nodes: 1\n"), "status", {"name": "NAME", **CLUSTER}),
        (SPOT, "jobs queue", {"job_name": "NAME", "task_name": "small", "status": "STARTING"}),
    ],
)
def test_what_comes_after_an_interrupted_launch_is_given_back(tmp_path, outside, change, words, listed):
    outside.answer(**{words.replace(" ", "_"): [listed]})
    outside.does(words, later=3)
    outside.does("launch" if words == "status" else "jobs launch", interrupts=True)
    with pytest.raises(KeyboardInterrupt):
        BACKEND.launch(stack(tmp_path, change), "aws", detach=True)
    assert len(outside.asked("down") + outside.asked("jobs cancel")) == 1
    assert len(outside.asked(words)) >= 5  # also until it was gone
    assert all_runs() == []


@pytest.mark.slow
def test_what_has_not_come_after_an_interrupted_launch_may_still_come(tmp_path, outside, capfd):
    outside.answer(status=[{"name": "NAME", **CLUSTER}])
    outside.does("status", later=10_000)
    outside.does("launch", interrupts=True)
    with pytest.raises(KeyboardInterrupt):
        BACKEND.launch(stack(tmp_path), "aws", detach=True)
    [run] = all_runs()
    told = capfd.readouterr().err
    assert "may still" in told and "sky api status" in told and f"stackrl down {run.id}" in told
    assert BACKEND.look(run, Handle.of(run)).phase == "waiting" and run.state().status == "created"
    [left] = BACKEND.down(run, Handle.of(run))
    assert "may still come" in left
    outside.answer(status=[{"name": Handle.of(run).job, **CLUSTER}])
    assert BACKEND.down(run, Handle.of(run)) == []
    asked = len(outside.asked("status"))
    assert BACKEND.down(run, Handle.of(run)) == []  # nothing more can come
    assert len(outside.asked("status")) == asked + 1


def test_a_client_that_was_killed_has_not_said_that_nothing_comes(tmp_path, outside, capfd):
    outside.answer(status=[])
    outside.does("launch", code=130)
    assert BACKEND.launch(stack(tmp_path), "aws", detach=True) == 1
    [run] = all_runs()
    assert "may still come" in capfd.readouterr().err and machines.may_come(Handle.of(run))


def test_a_launch_of_long_ago_brings_nothing_any_more(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.answer(status=[])
    details = {**handle.details, machines.SUBMITTING: "yes"}
    old = Handle("sky", handle.job, handle.submitted - machines.COMING_SECONDS, details=details)
    assert BACKEND.down(run, old) == [] and BACKEND.look(run, old).phase == "ended"


def test_what_cannot_be_given_back_stays_listed(tmp_path, outside, capfd):
    outside.answer()
    outside.refuse("status", "the API server is not reachable")
    outside.refuse("launch", "no machines")
    assert BACKEND.launch(stack(tmp_path), "aws", detach=True) == 1
    [run] = all_runs()
    told = capfd.readouterr().err
    assert "the API server is not reachable" in told and f"stackrl down {run.id}" in told


def test_without_the_command_the_way_to_it_is_told(tmp_path, outside, monkeypatch):
    (outside.folder / "sky").unlink()
    monkeypatch.setattr(sky_command, "ROOT", tmp_path)
    with pytest.raises(RunError, match="make sky"):
        BACKEND.launch(stack(tmp_path), "aws", detach=True)


@pytest.mark.parametrize(
    ("records", "phase", "words", "status"),
    [
        ([("small", "PENDING")], "waiting", "PENDING", "created"),
        ([("small", "RUNNING")], "running", "RUNNING", "created"),
        ([("small", "RECOVERING")], "waiting", "RECOVERING", "created"),
        (
            [("trainer", "RUNNING"), ("inference", "STARTING")],
            "running",
            "trainer RUNNING, inference STARTING",
            "created",
        ),
        ([("small", "SUCCEEDED")], "ended", "SUCCEEDED", "finished"),
        ([("trainer", "SUCCEEDED"), ("inference", "CANCELLED")], "ended", "", "finished"),
        ([("small", "FAILED_SETUP")], "ended", "FAILED_SETUP", "failed"),
        ([], "ended", "", "failed"),
    ],
)
def test_a_job_is_looked_at_task_by_task(tmp_path, outside, records, phase, words, status):
    run, handle = launched(tmp_path, "sky", SPOT)
    queue = [{"job_name": handle.job, "task_name": task, "status": state} for task, state in records]
    outside.answer(jobs_queue=[*queue, {"job_name": "other", "task_name": "x", "status": "RUNNING"}])
    seen = BACKEND.look(run, handle)
    assert seen.phase == phase and words in seen.words
    assert run.state().status == status


@pytest.fixture(params=["a cloud", "Slurm"])
def home_of_jobs(request, outside, monkeypatch) -> Path:
    """On a Slurm of SkyPilot's it is not that of the account which ssh comes to."""
    if request.param == "a cloud":
        return outside.home
    monkeypatch.setenv("SKY_CLUSTER_NAME", "small-1a2b")
    home = outside.home / ".sky_clusters" / "small-1a2b"
    home.mkdir(parents=True)
    return home


def test_a_cluster_is_looked_at_and_its_run_mirrored(tmp_path, outside, home_of_jobs):
    run, handle = launched(tmp_path)
    outside.answer(status=[{"name": handle.job, **CLUSTER}])
    there = home_of_jobs / ".stackrl" / "runs" / run.id
    there.mkdir(parents=True)
    state = json.loads((run.path / "state.json").read_text())
    (there / "state.json").write_text(json.dumps(state | {"status": "running", "attempt": 1}))
    (there / "metrics.jsonl").write_text('{"step": 3}\n')
    seen = BACKEND.look(run, handle)
    assert (seen.phase, seen.words) == ("running", "UP AWS us-east-1")
    assert run.state().status == "running" and run.metrics.read_text() == '{"step": 3}\n'
    assert (outside.folder / "hosts").read_text() == f"{handle.job}\n"
    outside.answer(status=[])
    assert BACKEND.look(run, handle).phase == "ended"
    assert run.state().status == "stopped"


def test_a_run_whose_own_last_word_has_arrived_keeps_it(tmp_path, outside):
    run, handle = launched(tmp_path)
    state = run.state()
    state.status = "finished"
    run.write_state(state)
    outside.answer(status=[])
    assert BACKEND.look(run, handle).phase == "ended" and run.state().status == "finished"


def test_skypilot_that_cannot_be_asked_is_no_end(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.refuse("status", "Could not connect to the API server")
    seen = BACKEND.look(run, handle)
    assert (seen.phase, seen.words) == ("unreachable", "Could not connect to the API server")
    assert run.state().status == "created"


def work_until_told(folder, at_work):
    """As a node program: it keeps the run until it is told of a preemption, and saves it then."""
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at_work.set()
        deadline = time.monotonic() + 20
        while not (folder / "preempt").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if (folder / "preempt").exists():
            (folder / "saved").touch()


def test_down_saves_first_and_gives_the_machines_back_once(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.answer(status=[{"name": handle.job, **CLUSTER}])
    there = outside.home / ".stackrl" / "runs" / run.id
    there.mkdir(parents=True)
    program = threading.Thread(target=work_until_told, args=(there, at_work := threading.Event()))
    program.start()
    assert at_work.wait(30)
    assert BACKEND.down(run, handle) == []
    program.join(30)
    assert (there / "saved").exists()
    assert BACKEND.down(run, handle) == []
    assert outside.asked("down") == [["down", handle.job, "-y"]]


def test_down_tells_what_it_cannot_reach(tmp_path, outside):
    run, handle = launched(tmp_path, "sky", SPOT)
    outside.answer(jobs_queue=[{"job_name": handle.job, "task_name": "small", "status": "RUNNING"}])
    outside.refuse("jobs cancel", "the controller is gone")
    [left] = BACKEND.down(run, handle)
    assert handle.job in left and "the controller is gone" in left


def test_a_cluster_that_skypilot_could_not_end_is_still_there(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.answer(status=[{"name": handle.job, **CLUSTER}])
    outside.refuse("down", FAILED_DOWN, code=0)
    [left] = BACKEND.down(run, handle)
    assert "still there" in left and handle.job in left and "not yours" in left


def a_job(handle, status="RUNNING"):
    return {"job_name": handle.job, "task_name": "small", "status": status}


def test_a_job_is_asked_for_until_it_has_ended(tmp_path, outside):
    run, handle = launched(tmp_path, "sky", SPOT)
    outside.answer(jobs_queue=[a_job(handle)])
    assert BACKEND.down(run, handle) == []
    assert len(outside.asked("jobs cancel")) == 1 and len(outside.asked("jobs queue")) == 3


@pytest.mark.parametrize(
    ("becomes", "words"), [("CANCELLING", "still there"), ("FAILED_CONTROLLER", "FAILED_CONTROLLER")]
)
def test_a_job_that_does_not_end_well_is_not_reached(tmp_path, outside, becomes, words):
    run, handle = launched(tmp_path, "sky", SPOT)
    outside.answer(jobs_queue=[a_job(handle)])
    outside.does("jobs queue", becomes=becomes)
    for _ in range(2):
        [left] = BACKEND.down(run, handle)
        assert words in left and handle.job in left


def test_a_controller_that_has_stopped_itself_is_started_to_be_asked(tmp_path, outside):
    run, handle = launched(tmp_path, "sky", SPOT)
    outside.answer(jobs_queue=[a_job(handle, "SUCCEEDED")])
    outside.refuse("jobs queue --all -o", "No in-progress managed jobs.")
    assert BACKEND.look(run, handle).phase == "ended" and run.state().status == "finished"


def test_a_launch_that_shows_the_run_notes_its_end(tmp_path, outside):
    job = {"job_name": "NAME", "task_name": "small", "status": "SUCCEEDED"}
    outside.answer(jobs_queue=[job])
    assert BACKEND.launch(stack(tmp_path, SPOT), "aws", detach=False) == 0
    run = find_run("latest")
    assert run.state().status == "finished" and Handle.of(run).ended is not None


@pytest.mark.slow
def test_a_second_down_does_not_wait_for_the_checkpoint(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.answer(status=[{"name": handle.job, **CLUSTER}])
    there = outside.home / ".stackrl" / "runs" / run.id
    there.mkdir(parents=True)
    (there / "preempt").touch()  # a notice, which is no word of `down`
    with subprocess.Popen([sys.executable, "-c", SAVES_FOR_EVER, str(there)]) as program:
        try:
            wait_for(lambda: (there / "lock").exists() and (there / "lock").read_text())
            first = threading.Thread(target=BACKEND.down, args=(run, handle))
            first.start()
            wait_for(lambda: (there / "preempt").read_text())
            assert program.poll() is None
            assert BACKEND.down(run, handle) == []
            assert program.wait(30) == -signal.SIGTERM
            first.join(30)
            assert not first.is_alive()
        finally:
            program.kill()


SAVES_FOR_EVER = """
import sys, time
from stackrl.runtime.run import RunFolder
with RunFolder(sys.argv[1]).kept():
    time.sleep(120)
"""


def wait_for(happens, limit=20.0):
    deadline = time.monotonic() + limit
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_command_goes_to_the_node_that_is_named(tmp_path, outside, home_of_jobs, capfd):
    run, handle = launched(tmp_path)
    assert BACKEND.execute(run, handle, ["sh", "-c", 'echo "a  b" && cd && pwd'], 0) == 0
    assert capfd.readouterr().out.endswith(f"a  b\n{home_of_jobs}\n")
    with pytest.raises(RunError, match="1 node"):
        BACKEND.execute(run, handle, ["true"], 1)


def test_a_run_goes_on_only_where_its_checkpoints_are(tmp_path, outside):
    run, _ = launched(tmp_path)
    with pytest.raises(RunError, match=r"durable checkpoint.path"):
        BACKEND.resume(run, "aws", None, detach=True)


def test_a_run_goes_on_under_its_own_id(tmp_path, outside):
    run, handle = launched(
        tmp_path, "aws", ("    version: 1\n", "    version: 1\n    checkpoint: {path: /bucket}\n")
    )
    assert BACKEND.resume(run, "gcp", None, detach=True) == 0
    again = Handle.of(run)
    assert again.job == f"{handle.job}-2" and again.details["infra"] == "gcp"
    assert f"STACKRL_RUN: {run.id}" in (run.path / "sky.yaml").read_text()


def test_what_machines_cost_is_noted_and_told_to_the_node(tmp_path, outside):
    catalog = tmp_path / ".sky" / "catalogs" / "v8" / "aws"
    catalog.mkdir(parents=True)
    (catalog / "vms.csv").write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone\n"
        "m6i.xlarge,,,4,16,0.192,0.08,us-east-1,use1-az1\n"
    )
    run, handle = launched(tmp_path, "sky", SPOT)
    assert handle.hourly == pytest.approx(0.08)
    assert "STACKRL_HOURLY: '0.0800'" in (run.path / "sky.yaml").read_text()
