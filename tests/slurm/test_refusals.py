"""What Slurm would never start is refused before it is submitted, in its own words, and leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import stacks
from stackrl.cli import _told
from stackrl.runtime.launch.slurm.backend import BACKEND
from stackrl.runtime.run import runs_home
from stackrl.schemas.loader import load

CPU = "resources: {infra: slurm, cpus: 2+}"


def launched(infra: str, *changes: tuple[str, str]) -> int:
    """The exit code of `stackrl launch small.yaml --infra INFRA -d`."""
    try:
        return BACKEND.launch(load(stacks.write(Path.cwd(), *changes)), infra, detach=True)
    except Exception as error:
        return _told(error)


def machines(resources: str, roles: str = "{trainer: {processes: 1}, inference: {processes: 1}}") -> Sequence:
    written = "    roles:\n      trainer: {processes: 1}\n      inference: {processes: 1}\n"
    return (("num_nodes: 1\n", f"num_nodes: 1\n{resources}\n"), (written, f"    roles: {roles}\n{SMALL}"))


SMALL = "    trainer: {sequence_length: 512}\n    inference: {max_model_length: 512}\n"
JOBS = ("squeue", "--noheader", "--states=all", "--format=%i")
GPUS = "{trainer: {gpus: 1}, inference: {gpus: rest}}"
QUOTED_TIME = 'time: "5"'
LINES = '"comment=x\\ntouch broken\\n#": true'
OPTIONS = "config: {slurm: {sbatch_options: {%s}}}"

REFUSED = {
    "a partition that is not there": (
        "slurm/tower/gpux",
        machines(CPU),
        ("Invalid partition name specified", "there is no gpux", "cpu, urgent, gpu"),
    ),
    "more GPUs than a node has": (
        "slurm/tower/gpu",
        machines("resources: {infra: slurm, accelerators: 'H100:8'}", GPUS),
        ("Requested node configuration is not available", "--gres=gpu:h100:8", "h100:4", "b200:4"),
    ),
    "a kind of GPU that is not there": (
        "slurm/tower/gpu",
        machines("resources: {infra: slurm, accelerators: 'A100:2'}", GPUS),
        ("Requested node configuration is not available", "gpu:a100:2", "h100:4"),
    ),
    "GPUs in a partition without": (
        "slurm/tower/cpu",
        machines("resources: {infra: slurm, accelerators: 'H100:2'}", GPUS),
        ("Requested node configuration is not available", "no GPUs"),
    ),
    "more cores than a node has": (
        "slurm",
        machines("resources: {cpus: 20+}"),
        ("Requested node configuration is not available", "--cpus-per-task=20", "8 cores"),
    ),
    "a constraint that no node has": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % 'constraint: fast'}"),
        ("Invalid feature specification",),
    ),
    "another cluster": ("slurm/spire", machines(CPU), ("the cluster tower, not to spire",)),
    "machines of a cloud alone": (
        "slurm",
        machines("resources: {infra: aws, cpus: 2+}"),
        ("small.yaml:", "none of these is on the Slurm cluster tower: aws"),
    ),
    "spot": ("slurm", machines("resources: {infra: slurm, use_spot: true}"), ("no spot machines",)),
    "a container without pyxis": (
        "slurm",
        machines("resources: {infra: slurm, image_id: 'docker:ubuntu:24.04'}"),
        ("small.yaml:", "cannot start containers"),
    ),
    "an option that is the launcher's": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % 'nodes: 3, mail-user: me'}"),
        ("small.yaml:4:", "config.slurm.sbatch_options.nodes", "say num_nodes"),
    ),
    "another cluster among the options": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % 'clusters: spire, M: spire'}"),
        (
            "small.yaml:4:",
            "sbatch_options.clusters",
            "sbatch_options.M",
            "say resources: {infra: slurm/CLUSTER}",
        ),
    ),
    "an option that lets sbatch wait": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % 'wait: true'}"),
        ("small.yaml:4:", "sbatch_options.wait", "launch waits for the run's end"),
    ),
    "an option of several lines": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % LINES}"),
        ("an option of sbatch is one line", "mend it in the stack"),
    ),
    "a time that YAML reads as a number": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % 'time: 24:00:00'}"),
        ("sbatch_options.time", "86400", "in quotes"),
    ),
    "too little time to save": (
        "slurm",
        machines(f"{CPU}\n{OPTIONS % QUOTED_TIME}"),
        ("a time limit of 5 minutes leaves no time", "limits.stop_seconds"),
    ),
    "a secret in the file": (
        "slurm",
        machines(f"{CPU}\nsecrets: {{HF_TOKEN: a-value}}"),
        ("secrets.HF_TOKEN", "say secrets: {HF_TOKEN: null}"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_cannot_start_is_refused_with_the_reason(
    slurm, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    infra, changes, words = REFUSED[name]
    before = slurm.command(*JOBS)
    assert launched(infra, *changes) == 2
    told = capsys.readouterr().err
    assert not [word for word in words if word not in told], told
    assert "Traceback" not in told
    assert not list(runs_home().glob("*")), "the run's folder is left"
    assert slurm.command(*JOBS) == before, "a job was submitted"


def test_without_slurm_the_user_is_told_where_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stackrl.runtime.launch.slurm import commands as slurm_commands

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm_commands.cluster.cache_clear()
    assert launched("slurm", *machines(CPU)) == 2
    assert "login node" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "home")
