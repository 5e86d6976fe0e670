"""What `stackrl launch` makes of a stack for SkyPilot: its own task with what a run needs besides."""

import fcntl
import json
import os
import subprocess
import time

import pytest
import yaml

import stacks
from stackrl.runtime.launch.sky import group as sky_group
from stackrl.runtime.launch.sky import task as sky_task
from stackrl.runtime.launch.sky.task import Launch
from stackrl.runtime.place import job_run_id
from stackrl.runtime.run import RunError
from stackrl.schemas.loader import load

ANY = {
    "disk_size": 200,
    "any_of": [
        {"infra": "slurm", "accelerators": "H200:8"},
        {"infra": "kubernetes/home", "accelerators": "H200:8", "use_spot": True},
        {"infra": "aws", "accelerators": "B200:8", "use_spot": True},
        {"infra": "aws/us-east-1", "accelerators": "H200:8"},
    ],
}


@pytest.mark.parametrize(
    ("resources", "infra", "expected"),
    [
        (ANY, "sky", ANY),
        (ANY, "slurm", {"infra": "slurm", "disk_size": 200, "accelerators": "H200:8"}),
        (
            ANY,
            "k8s",
            {"infra": "kubernetes/home", "disk_size": 200, "accelerators": "H200:8", "use_spot": True},
        ),
        (
            ANY,
            "aws/us-east-1",
            {
                "disk_size": 200,
                "any_of": [
                    {"infra": "aws/us-east-1", "disk_size": 200, "accelerators": "B200:8", "use_spot": True},
                    {"infra": "aws/us-east-1", "disk_size": 200, "accelerators": "H200:8"},
                ],
            },
        ),
        (
            {"ordered": [{"infra": "aws"}, {"infra": "azure"}], "accelerators": "H100:8"},
            "gcp",
            {"infra": "gcp", "accelerators": "H100:8"},
        ),
        ({"cloud": "aws", "region": "us-west-2"}, "gcp", {"infra": "gcp"}),
        ({"cloud": "aws", "region": "us-west-2"}, "aws", {"infra": "aws/us-west-2"}),
        ({}, "aws", {"infra": "aws"}),
    ],
)
def test_infra_takes_the_alternatives_that_are_there(resources, infra, expected):
    assert sky_task.pinned(resources, infra) == expected


def test_machines_go_when_the_run_has_ended_unless_the_stack_says_otherwise():
    assert sky_task.given_back({})["autostop"] == {"idle_minutes": 10, "down": True}
    for said in (False, {"idle_minutes": 5}):
        assert sky_task.given_back({"autostop": said})["autostop"] == said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, {"recover_on_exit_codes": [75]}),
        ("FAILOVER", {"strategy": "FAILOVER", "recover_on_exit_codes": [75]}),
        (
            {"max_restarts_on_errors": 3, "recover_on_exit_codes": 33},
            {"max_restarts_on_errors": 3, "recover_on_exit_codes": [33, 75]},
        ),
        ({"recover_on_exit_codes": [75]}, {"recover_on_exit_codes": [75]}),
    ],
)
def test_a_managed_job_starts_again_where_its_machine_is_lost(said, expected):
    resources = {} if said is None else {"job_recovery": said}
    assert sky_task.recovering(resources)["job_recovery"] == expected


@pytest.mark.parametrize("key", ["any_of", "ordered"])
def test_so_it_does_on_alternatives_that_say_how_they_recover(key):
    choices = [{"infra": "aws", "job_recovery": "FAILOVER"}, {"infra": "gcp"}]
    made = sky_task.recovering({"job_recovery": {"max_restarts_on_errors": 3}, key: choices})
    assert made["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert made[key] == [
        {"infra": "aws", "job_recovery": {"strategy": "FAILOVER", "recover_on_exit_codes": [75]}},
        {"infra": "gcp"},
    ]


def launch(folder, run_id="small-20260101-000000-ab12", hourly=12.5):
    return Launch(run_id, sky_task.sky_name(run_id, 1), folder / "launched.yaml", hourly, 5.0)


def test_names_are_those_that_skypilot_takes():
    assert sky_task.sky_name("glm4.5_air-1", 1) == "glm4-5-air-1"
    assert sky_task.sky_name("4090-1", 3) == "run-4090-1-3"


def test_the_resolved_stack_names_itself_and_is_accepted_on_the_node(tmp_path, monkeypatch):
    changes = [
        ("workdir: .\n", f"workdir: {tmp_path}/code\nsecrets: {{HF_TOKEN: null}}\n"),
        ("envs: {STACK: small.yaml}", "envs: {STACK: small.yaml, WANDB_MODE: offline}"),
    ]
    (tmp_path / "code").mkdir()
    source = load(stacks.write(tmp_path / "code", *changes), ["algorithm.batch_size=32"])
    given = launch(tmp_path)
    text = sky_task.as_yaml([sky_task.resolved(source.task, source.stack, given)])
    node = tmp_path / "sky_workdir"
    (node / ".stackrl").mkdir(parents=True)
    (node / given.remote).write_bytes(text)
    monkeypatch.chdir(node)
    arrived = load(given.remote)
    assert arrived.stack == source.stack and arrived.stack.algorithm.batch_size == 32
    assert arrived.task["envs"]["WANDB_MODE"] == "offline"


def test_the_run_keeps_its_id_on_whichever_machines_and_jobs():
    told = {"STACKRL_RUN": "small-1", "SKYPILOT_MANAGED_JOB_ID": "7", "SKYPILOT_JOB_RANK": "0"}
    assert job_run_id("small", told) == "small-1"


def test_no_secret_is_in_any_file(tmp_path):
    task = {"secrets": {"HF_TOKEN": "hf_abc", "STACKRL_TOKEN": None}, "resources": {}}
    stack = load(stacks.write(tmp_path)).stack
    assert b"hf_abc" not in sky_task.as_yaml([sky_task.resolved(task, stack, launch(tmp_path))])


def test_the_task_brings_the_stack_and_names_the_run(tmp_path):
    source = load(stacks.write(tmp_path))
    made = sky_task.submitted(source.task | {"file_mounts": {"/data": "./data"}}, launch(tmp_path))
    assert made["file_mounts"] == {
        "/data": "./data",
        ".stackrl/small-20260101-000000-ab12.yaml": str(tmp_path / "launched.yaml"),
    }
    assert made["envs"] == {
        "STACK": ".stackrl/small-20260101-000000-ab12.yaml",
        "STACKRL_RUN": "small-20260101-000000-ab12",
        "STACKRL_JOB": "small-20260101-000000-ab12",
        "STACKRL_HOURLY": "12.5000",
    }
    assert made["run"] == 'stackrl node "$STACK"' and "_metadata" not in made
    (hook,) = made["config"]["hooks"]
    assert hook["events"] == ["stop", "preemption", "down"] and hook["timeout"] > 5


def test_a_hook_of_the_stack_stays(tmp_path):
    task = {"config": {"hooks": [{"run": "date"}], "docker": {"run_options": []}}}
    config = sky_task.submitted(task, launch(tmp_path))["config"]
    assert config["hooks"][0] == {"run": "date"} and config["docker"] == {"run_options": []}


@pytest.fixture(params=["runs/small-1", "nodes/2/small-1"])
def node_home(request, tmp_path):
    """A node's home with a run that is at work, the lock held as the node program holds it."""
    folder = tmp_path / ".stackrl" / request.param
    folder.mkdir(parents=True)
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, lock


def save(home, limit):
    given = Launch("small-1", "small-1", home / "launched.yaml", None, limit - 1.0)
    script = sky_task.saving_hook({}, given)["run"]
    return subprocess.Popen(["sh", "-c", script], env={"HOME": str(home), "PATH": os.environ["PATH"]})


def test_the_hook_asks_the_run_to_save_and_waits_for_its_end(tmp_path, node_home):
    folder, lock = node_home
    with save(tmp_path, 30) as hook:
        deadline = time.monotonic() + 10
        while not (folder / "preempt").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (folder / "preempt").exists() and hook.poll() is None
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert hook.wait(30) == 0


def test_the_hook_does_not_wait_for_ever(tmp_path, node_home):
    assert save(tmp_path, 1).wait(30) == 1


def test_the_hook_waits_also_for_a_run_that_down_has_told(tmp_path, node_home):
    folder, _ = node_home
    (folder / "preempt").write_text("down\n")
    with subprocess.Popen(["sleep", "60"]) as program:
        (folder / "lock").write_text(str(program.pid))
        try:
            assert save(tmp_path, 1).wait(30) == 1
            assert program.poll() is None
        finally:
            program.kill()


def test_the_hook_leaves_a_run_alone_that_is_not_at_work(tmp_path, node_home):
    folder, lock = node_home
    fcntl.flock(lock, fcntl.LOCK_UN)
    assert save(tmp_path, 30).wait(20) == 0
    assert not (folder / "preempt").exists()


def test_the_home_that_the_stack_chooses_is_where_the_hook_looks():
    assert sky_task.remote_home({"envs": {"STACKRL_HOME": "~/of-mine"}}) == "$HOME/of-mine"


# ---- mixed hardware

MIXED = stacks.GOOD.replace(
    "num_nodes: 1\n",
    "num_nodes: 3\nresources: {infra: k8s, accelerators: 'H100:8'}\nsecrets: {STACKRL_TOKEN: null}\n",
).replace(
    "      trainer: {processes: 1}\n      inference: {processes: 1}\n",
    "      trainer: {nodes: 1, resources: {accelerators: 'B200:4'}}\n      inference: {nodes: rest}\n",
)


def group(folder, infra="sky", *changes):
    source = load(stacks.write(folder, *changes, base=MIXED))
    return sky_group.documents(source.task, source.stack, launch(folder, "small-1"), infra)


def test_a_group_has_a_task_for_each_role(tmp_path):
    header, trainer, inference = group(tmp_path)
    assert header["execution"] == "parallel" and header["primary_tasks"] == ["trainer"]
    assert header["inter_connection"] is True
    assert (trainer["name"], trainer["num_nodes"]) == ("trainer", 1)
    assert (inference["name"], inference["num_nodes"]) == ("inference", 2)
    assert trainer["resources"]["accelerators"] == "B200:4"
    assert inference["resources"]["accelerators"] == "H100:8"


def test_the_nodes_of_a_group_know_their_rank_and_all_addresses(tmp_path):
    places = []
    for task in group(tmp_path)[1:]:
        told = task["run"].replace('stackrl node "$STACK"', "env")
        for rank in range(task["num_nodes"]):
            variables = {"SKYPILOT_JOBGROUP_NAME": "g", "SKYPILOT_NODE_RANK": str(rank)}
            done = subprocess.run(["bash", "-c", told], env=variables, capture_output=True, text=True)
            lines = dict(line.split("=", 1) for line in done.stdout.splitlines())
            places.append((lines["STACKRL_NODE_RANK"], lines["STACKRL_NODE_ADDRESSES"]))
    addresses = "trainer-0.g,inference-0.g,inference-1.g"
    assert places == [("0", addresses), ("1", addresses), ("2", addresses)]


def test_roles_that_could_not_find_each_other_are_refused(tmp_path):
    with pytest.raises(RunError, match="--infra k8s or --infra slurm"):
        group(tmp_path, "aws")
    with pytest.raises(RunError, match="name no Kubernetes"):
        group(tmp_path, "sky", ("infra: k8s", "infra: aws"))


def test_scripts_are_written_line_by_line(tmp_path):
    text = sky_task.as_yaml(group(tmp_path)).decode()
    assert "run: |" in text and "&id" not in text
    assert json.dumps(list(yaml.safe_load_all(text))) == json.dumps(group(tmp_path))
