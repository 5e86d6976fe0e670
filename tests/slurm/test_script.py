"""What a stack becomes for sbatch. No Slurm is needed: what its commands would say is given."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_roles import wait_until

import stacks
from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.again import environment_of
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.launch.slurm import backend
from stackrl.runtime.launch.slurm import commands as slurm_commands
from stackrl.runtime.launch.slurm import request as slurm_request
from stackrl.runtime.launch.slurm import script as slurm_script
from stackrl.runtime.launch.slurm.commands import Hardware, Job, words_of
from stackrl.runtime.launch.slurm.request import Part, Request, overruling, requests_of
from stackrl.runtime.launch.slurm.script import render, warning_of
from stackrl.runtime.run import RunError, RunFolder, create_run
from stackrl.schemas.loader import LoadedStack, load

H100 = Hardware(96, 2_000_000, {"h100": 8})
KINDS = {
    "": [Hardware(16, 64_000, {})],
    "gpu": [H100, Hardware(128, 3_000_000, {"nvidia_b200": 8})],
    "old": [Hardware(64, 500_000, {"a100": 4}), Hardware(64, 1_000_000, {"nvidia_a100-sxm4-80gb": 8})],
    "plain": [Hardware(64, 500_000, {"": 4})],
}
ROLES = "    roles:\n      trainer: {processes: 1}\n      inference: {processes: 1}\n"
SECRET = "secrets: {STACKRL_TOKEN: null}\n"
SMALL = "    trainer: {sequence_length: 512}\n    inference: {max_model_length: 512}\n"
TWO_NODES = "    roles: {trainer: {nodes: 1}, inference: {nodes: 1}}\n"


@pytest.fixture(autouse=True)
def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slurm_commands, "cluster", lambda: "tower")
    monkeypatch.setattr(slurm_commands, "hardware", lambda partition="": KINDS[partition])
    monkeypatch.setattr(slurm_commands, "default_time", lambda partition="": "7-00:00:00")
    monkeypatch.setattr(slurm_commands, "takes_containers", lambda: True)
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "a home"))
    monkeypatch.chdir(tmp_path)
    yield


def loaded(resources: str, *, nodes: int = 1, roles: str = ROLES, more: str = "") -> LoadedStack:
    task = f"num_nodes: {nodes}\nresources: {resources}\n{more}"
    return load(stacks.write(Path.cwd(), ("num_nodes: 1\n", task), (ROLES, roles + SMALL)))


def asked(resources: str, infra: str = "slurm", **more) -> list[Sequence[str]]:
    """The options for a node of each part, of the first request."""
    return [part.options for part in requests_of(loaded(resources, **more), infra)[0].parts]


def run_of(source: LoadedStack) -> RunFolder:
    plan = asdict(make_plan(source))
    return create_run(source.name, source.path, source.hash, source.stack, plan, environment_of(source))


@pytest.mark.parametrize(
    ("partition", "accelerators", "expected"),
    [
        ("gpu", "H100:8", ["--gres=gpu:h100:8", "--exclusive", "--mem=0"]),
        ("gpu", "H100:2", ["--gres=gpu:h100:2", "--cpus-per-task=24", "--mem=500000M"]),
        ("gpu", "B200:8", ["--gres=gpu:nvidia_b200:8", "--exclusive", "--mem=0"]),
        ("gpu", "L40S:8", ["--gres=gpu:l40s:8", "--exclusive", "--mem=0"]),
        ("old", "A100-80GB:8", ["--gres=gpu:nvidia_a100-sxm4-80gb:8", "--exclusive", "--mem=0"]),
        ("old", "A100:4", ["--gres=gpu:a100:4", "--exclusive", "--mem=0"]),
        ("plain", "H100:2", ["--gres=gpu:2", "--cpus-per-task=32", "--mem=250000M"]),
    ],
)
def test_accelerators_are_asked_for_as_the_cluster_calls_them(
    partition: str, accelerators: str, expected: list[str]
) -> None:
    roles = "    roles: {trainer: {gpus: 1}, inference: {gpus: rest}}\n"
    resources = f"{{infra: slurm/tower/{partition}, accelerators: '{accelerators}'}}"
    assert asked(resources, roles=roles) == [tuple(expected)]


def test_cores_and_memory_that_the_stack_says_leave_the_rest_of_a_node_to_others() -> None:
    assert asked("{infra: slurm, cpus: 4+, memory: 16+}") == [("--cpus-per-task=4", "--mem=16G")]
    assert asked("{infra: slurm, cpus: 4}") == [("--cpus-per-task=4",)]
    assert asked("{infra: slurm, memory: 16}") == [("--exclusive", "--mem=16G")]
    assert asked("{infra: slurm}") == [("--exclusive", "--mem=0")]


def test_the_partition_is_that_of_the_command_line_else_of_the_stack() -> None:
    def partitions(infra: str, resources: str) -> list[str]:
        return [request.parts[0].partition for request in requests_of(loaded(resources), infra)]

    assert partitions("slurm", "{infra: slurm/tower/gpu}") == ["gpu"]
    assert partitions("slurm/tower/old", "{infra: slurm/tower/gpu}") == ["old"]
    assert partitions("slurm", "{infra: slurm}") == partitions("slurm/tower", "{cpus: 2}") == [""]
    choices = (
        "{any_of: [{infra: slurm/spire}, {infra: aws}, {infra: slurm/tower/old}, {infra: slurm/tower/gpu}]}"
    )
    assert partitions("slurm", choices) == ["old", "gpu"]


def test_roles_with_hardware_of_their_own_are_parts_of_one_job() -> None:
    roles = (
        "    roles:\n      trainer: {nodes: 2, resources: {accelerators: 'B200:8'}}\n"
        "      inference: {nodes: 1, resources: {infra: slurm/tower/old, accelerators: 'A100:4'}}\n"
        "    checkpoint: {path: /shared}\n"
    )
    source = loaded("{infra: slurm/tower/gpu}", nodes=3, roles=roles, more=options("account: me") + SECRET)
    (request,) = requests_of(source, "slurm")
    assert [(part.partition, part.nodes, part.options[0]) for part in request.parts] == [
        ("gpu", 2, "--gres=gpu:nvidia_b200:8"),
        ("old", 1, "--gres=gpu:a100:4"),
    ]
    run = create_run("mixed", source.path, source.hash, source.stack, {})
    text = render(run, request, {})
    first, second = text.split("#SBATCH hetjob\n")
    for part, nodes in ((first, 2), (second, 1)):
        assert f"#SBATCH --nodes={nodes}\n" in part and "#SBATCH --account=me\n" in part
    assert "#SBATCH --requeue\n" in first and "--requeue" not in second
    assert "--het-group=0,1" in text
    assert 'in "$SLURM_JOB_NODELIST_HET_GROUP_0" "$SLURM_JOB_NODELIST_HET_GROUP_1"; do' in text


def options(text: str) -> str:
    return f"config: {{slurm: {{sbatch_options: {{{text}}}}}}}\n"


def test_the_options_of_the_stack_are_passed_on() -> None:
    more = options('account: lab, time: "1-12", constraint: "a&b", nice: true, reboot: null, mail: false')
    (request,) = requests_of(loaded("{infra: slurm}", more=more), "slurm")
    assert request.options == ("--account=lab", "--time=1-12", "--constraint=a&b", "--nice", "--reboot")
    assert request.time_limit == 36 * 3600
    text = render(run_of(loaded("{infra: slurm}")), request, {})
    assert "#SBATCH --constraint='a&b'\n" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400),
        ("1-2:30:05", 95405), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_the_time_limit_in_all_of_sbatchs_forms(text: str, seconds: int | None) -> None:
    source = loaded("{infra: slurm}", more=options(f'time: "{text}"'))
    assert requests_of(source, "slurm")[0].time_limit == seconds


def test_the_run_is_warned_early_enough_to_save_and_not_before_it_could_train() -> None:
    run, request = run_of(loaded("{infra: slurm}")), Request((), ())
    warning = warning_of(run, request)
    assert warning == 120 + 90 + 60  # limits.stop_seconds, the guard's patience, a margin
    assert warning_of(run, replace(request, time_limit=2 * warning)) == warning
    with pytest.raises(RunError, match=r"a time limit of 5 minutes .* 10 minutes or more"):
        warning_of(run, replace(request, time_limit=300))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("docker:ubuntu:24.04", "ubuntu:24.04"),
        ("docker:org/image:1", "org/image:1"),
        ("docker:ghcr.io/org/image:1", "ghcr.io#org/image:1"),
        ("docker:localhost:5000/image", "localhost:5000#image"),
    ],
)
def test_a_container_is_asked_for_in_the_words_of_pyxis(image: str, expected: str) -> None:
    source = loaded(f"{{infra: slurm, image_id: '{image}'}}")
    (request,) = requests_of(source, "slurm")
    assert request.image == expected
    run = run_of(source)
    text = render(run, request, {})
    assert f"--container-image={expected} " in text.replace("'", "")
    assert f"{run.path}:{run.path},{Path.cwd()}:{Path.cwd()}" in text
    assert 'stackrl node "$run"' in text and "-m stackrl" not in text


@pytest.mark.parametrize(
    "request_",
    [
        Request((Part("gpu", 1, ("--gres=gpu:h100\ntouch broken:8",)),), ()),
        Request((Part("gpu", 1, ()),), ("--comment\ntouch broken\n#",)),
        Request((Part("gpu\ntouch broken", 1, ()),), ()),
    ],
)
def test_an_option_of_several_lines_is_no_command_of_the_script(request_: Request) -> None:
    run = run_of(loaded("{infra: slurm}"))
    with pytest.raises(RunError, match=r"an option of sbatch is one line, not .*touch broken"):
        render(run, request_, {})


def test_a_name_of_several_lines_is_one_word_for_slurm() -> None:
    source = loaded("{infra: slurm}")
    run = run_of(replace(source, task={**source.task, "name": "math\ntouch broken; @EXPORTS@"}))
    text = render(run, Request((Part("gpu", 1, ()),), ()), {"SAID": "@SRUN@"})
    assert "#SBATCH --job-name=math-touch-broken-EXPORTS-\n" in text
    assert "export SAID=@SRUN@\n" in text


def test_what_a_shell_wishes_of_sbatch_does_not_overrule_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sbatch listens to its variables before it listens to the script."""
    kept = {"SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION"}
    dropped = {
        "SBATCH_PARTITION", "SBATCH_EXPORT", "SBATCH_NO_REQUEUE", "SBATCH_SIGNAL", "SBATCH_CLUSTERS",
        "SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_OPEN_MODE", "SBATCH_JOB_NAME", "SBATCH_GRES",
        "SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_GPUS_PER_NODE", "SLURM_CLUSTERS",
    }  # fmt: skip
    for name in {*kept, *dropped, "SBATCH_TIMELIMIT", "SBATCH_CPUS_PER_GPU"}:
        monkeypatch.setenv(name, "30")

    def left(more: str) -> set[str]:
        (request,) = requests_of(loaded("{infra: slurm}", more=more), "slurm")
        environment = backend._environment(overruling(request))
        return {name for name in environment if name.startswith(("SBATCH_", "SLURM_"))}

    assert left("") == {*kept, "SBATCH_TIMELIMIT"}
    assert left(options('time: "60", account: lab')) == {"SBATCH_QOS", "SBATCH_RESERVATION"}
    (request,) = requests_of(loaded("{infra: slurm}"), "slurm")
    assert request.time_limit == 30 * 60


def test_a_run_that_is_told_to_end_while_it_saves_does_not_queue_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, with programs in the place of Slurm's; the node's ends with 75 when it has saved."""
    monkeypatch.setattr(slurm_script, "_step", lambda run, request: ['srun "$run"'])
    run = run_of(loaded("{infra: slurm}"))
    programs(tmp_path, monkeypatch, scontrol=f'echo "$*" >>{tmp_path}/asked', srun=SAVES)
    (tmp_path / "slurm.sh").write_text(render(run, Request((Part("cpu", 1, ()),), ()), {}))
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "cpu1"}
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen(["bash", "slurm.sh"], env=environment, stdout=log, stderr=log)
    try:
        wait_until((run.path / "lock").exists)
        job.send_signal(signal.SIGUSR1)
        wait_until((run.path / "preempt").exists)
        job.send_signal(signal.SIGUSR2)
        assert job.wait(30) == 75
    finally:
        job.kill()
        job.wait()
    assert "told to end" in (tmp_path / "log").read_text()
    assert "requeue" not in (tmp_path / "asked").read_text()


SAVES = """
trap 'told=yes' TERM
until [ "$told" ]; do [ -e "$1/lock" ] || { echo $$ >"$1/new"; mv "$1/new" "$1/lock"; }; sleep 0.1; done
exit 75
"""


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Shell scripts that are found by their names."""
    (folder / "bin").mkdir()
    for name, text in texts.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("submits", "told"),
    [
        ("sleep 30", "it did not answer within 1 s; .* may be queued: see `squeue --me -n small`"),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", "timed out .* may be queued"),
        ("echo 'You have too many jobs' >&2; exit 1", "You have too many jobs$"),
    ],
)
def test_a_job_that_may_be_queued_all_the_same_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submits: str, told: str
) -> None:
    """Here squeue does not know it yet, and lists one of another run."""
    run = run_of(loaded("{infra: slurm}"))
    monkeypatch.setattr(slurm_commands, "LIMIT", 1.0)
    other, asked = "echo '17|/elsewhere/slurm.sh'", f"touch {tmp_path}/cancelled"
    programs(
        tmp_path, monkeypatch, sbatch=f"[ $1 = --test-only ] || {{ {submits}; }}", squeue=other, scancel=asked
    )
    with pytest.raises(RunError, match=told):
        backend._submit(run, [Request((Part("cpu", 1, ()),), ())], "slurm")
    assert not (tmp_path / "cancelled").exists() and not (run.path / "handle.json").exists()


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("PENDING", "waiting"), ("SPECIAL_EXIT", "waiting"), ("A_NEW_ONE", "waiting"), ("RUNNING", "running"),
        ("COMPLETING", "running"), ("NODE_FAIL", "ended"), ("DEADLINE", "ended"), ("COMPLETED", "ended"),
    ],
)  # fmt: skip
def test_a_job_has_ended_only_where_no_state_can_follow(state: str, phase: str) -> None:
    assert Job(state, "None", "").phase == phase


def test_the_script_is_good_shell_and_quotes_what_it_is_given() -> None:
    source = loaded("{infra: slurm}")
    run = run_of(source)
    (request,) = requests_of(source, "slurm")
    text = render(run, request, {"GREETING": "it's $HOME; `rm`", "STACK": "small.yaml"})
    assert "export GREETING='it'\"'\"'s $HOME; `rm`'\n" in text
    assert f"run='{run.path}'\n" in text  # a home with a blank
    assert "@" not in text.replace("USR1@", "")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert max(map(len, text.splitlines())) < 200


def test_a_plan_for_slurm_is_not_measured_against_this_machine() -> None:
    source = loaded("{infra: slurm, accelerators: 'H100:8'}", nodes=2, roles=TWO_NODES, more=SECRET)
    _, plan = admit(source, here=False)
    assert {process["node"] for process in plan["processes"]} == {0, 1}


def test_what_slurm_says_is_told_without_the_names_of_its_programs() -> None:
    errors = "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name\n\n"
    told = "invalid partition specified: x; allocation failure: Invalid partition name"
    assert words_of(errors) == told
    assert str(Job("PENDING", "Resources", "")) == "PENDING (Resources)"
    assert str(Job("RUNNING", "None", "gpu[1-2]")) == "RUNNING on gpu[1-2]"
    assert str(Job("COMPLETED", "None", "gpu1")) == "COMPLETED"


def test_gpus_as_sinfo_writes_them() -> None:
    read = slurm_commands._gpus
    assert read("gpu:h100:8(S:0-1),nvme:1") == {"h100": 8}
    assert read("gpu:4") == {"": 4} and read("(null)") == {}
    assert read("gpu:a100:4,gpu:h100:2") == {"a100": 4, "h100": 2}
    assert slurm_request._least("4x") == 0 and slurm_request._least("32GB+") == 32
