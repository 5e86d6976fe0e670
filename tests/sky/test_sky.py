"""The backend that asks SkyPilot: what it asks, and what it makes of the answers.

A small program stands in for `sky`: it notes how it is called and answers from a file. Another one stands in
for `ssh`: it runs the script here, in the home folder of a node.
"""

from __future__ import annotations

import fcntl
import json
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_roles import fresh_home

import stacks
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.sky import command as sky_command
from stackrl.runtime.launch.sky.backend import BACKEND
from stackrl.runtime.run import RunError, all_runs, find_run
from stackrl.schemas.loader import load

SKY = f"""#!{sys.executable}
import json, os, pathlib, sys

here = pathlib.Path({{here!r}})
with open(here / "calls", "a") as calls:
    secrets = {{name: os.environ[name] for name in ("HF_TOKEN", "STACKRL_TOKEN") if name in os.environ}}
    calls.write(json.dumps({{"arguments": sys.argv[1:], "secrets": secrets}}) + "\\n")
answers = json.loads((here / "answers").read_text())
verb = " ".join(word for word in sys.argv[1:3] if not word.startswith("-") and word.islower())
for words, answer in answers.items():
    if " ".join(sys.argv[1:]).startswith(words):
        print(answer["says"] if isinstance(answer["says"], str) else json.dumps(answer["says"]))
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
        for name, text in (("sky", SKY.replace("{here!r}", repr(str(folder)))), ("ssh", SSH)):
            if name == "sky":
                text = text.replace("{{", "{").replace("}}", "}")
            else:
                text = text.format(here=folder, home=self.home)
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        self.answer()

    def answer(self, **answers: object) -> None:
        """What `sky` says to what begins with these words; `code_…` is the exit code."""
        self.answers = {
            words.replace("_", " "): {"says": says} for words, says in answers.items() if says is not None
        }
        self._keep()

    def refuse(self, words: str, says: str) -> None:
        self.answers = {words: {"says": says, "code": 1}, **self.answers}
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


def test_a_launch_that_fails_gives_back_what_it_got(tmp_path, outside, capfd):
    outside.answer(status=None, down="done")
    outside.refuse("launch", "ResourcesUnavailableError: no machines")
    source = stack(tmp_path)
    answered = []

    def answer_with_cluster(*arguments):
        name = outside.calls[0]["arguments"][2] if outside.calls else ""
        outside.answers["status"] = {"says": [{"name": name, **CLUSTER}]}
        outside._keep()
        answered.append(name)
        return original(*arguments)

    original = sky_command.submit
    try:
        sky_command.submit = lambda *arguments: (original(*arguments), answer_with_cluster(["true"], {}))[0]
        assert BACKEND.launch(source, "aws", detach=True) == 1
    finally:
        sky_command.submit = original
    assert outside.asked("down") == [["down", answered[0], "-y"]]
    assert "no machines" in capfd.readouterr().err
    assert all_runs() == []


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


def test_a_cluster_is_looked_at_and_its_run_mirrored(tmp_path, outside):
    run, handle = launched(tmp_path)
    outside.answer(status=[{"name": handle.job, **CLUSTER}])
    there = outside.home / ".stackrl" / "runs" / run.id
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
    outside.answer(status=[{"name": handle.job, **CLUSTER}], down="gone")
    there = outside.home / ".stackrl" / "runs" / run.id
    there.mkdir(parents=True)
    program = threading.Thread(target=work_until_told, args=(there, at_work := threading.Event()))
    program.start()
    assert at_work.wait(10)
    assert BACKEND.down(run, handle) == []
    program.join(10)
    assert (there / "saved").exists()
    outside.answer(status=[])
    assert BACKEND.down(run, handle) == []
    assert outside.asked("down") == [["down", handle.job, "-y"]]


def test_down_tells_what_it_cannot_reach(tmp_path, outside):
    run, handle = launched(tmp_path, "sky", SPOT)
    outside.answer(jobs_queue=[{"job_name": handle.job, "task_name": "small", "status": "RUNNING"}])
    outside.refuse("jobs cancel", "the controller is gone")
    [left] = BACKEND.down(run, handle)
    assert handle.job in left and "the controller is gone" in left


def test_a_command_goes_to_the_node_that_is_named(tmp_path, outside, capfd):
    run, handle = launched(tmp_path)
    assert BACKEND.execute(run, handle, ["echo", "a  b"], 0) == 0
    assert capfd.readouterr().out.endswith("a  b\n")
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
