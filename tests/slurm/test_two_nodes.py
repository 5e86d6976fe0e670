"""Two nodes of a real Slurm train with the real engine: the trainer on one, the engine on the other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import Cluster, wait_until

import stacks
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.run import RunFolder, all_runs

STACK = stacks.ROOT / "stacks" / "reverse-text-2-nodes.yaml"
LIMIT = 500.0
"""Seconds for a run on two slow cores; three steps take about two minutes."""


def stackrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stackrl", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=stacks.ROOT,
    )


def launched(*changes: str) -> tuple[RunFolder, Handle]:
    """`stackrl launch STACK --infra slurm -d`."""
    sets = [word for change in changes for word in ("--set", change)]
    done = stackrl("launch", str(STACK), "--infra", "slurm", "-d", *sets)
    assert done.returncode == 0, done.stderr
    (run,) = all_runs()
    assert done.stdout.strip() == run.id
    return run, Handle.of(run)


def told(run: RunFolder) -> str:
    """What the run's node programs and the script said, for a failure's message."""
    return (run.path / "logs" / "node.log").read_text() + json.dumps(vars(run.state()), indent=1)


def wait_for(condition: Callable[[], object], run: RunFolder, what: str, limit: float = LIMIT) -> None:
    try:
        wait_until(condition, what, limit)
    except TimeoutError as error:
        pytest.fail(f"{error}\n{told(run)}")


def steps(run: RunFolder) -> int:
    """Optimizer steps that were recorded, in whichever life."""
    if not run.metrics.exists():
        return 0
    return len({json.loads(line)["index"] for line in run.metrics.read_text().splitlines()})


def audited(run: RunFolder) -> int:
    """Optimizer steps by the books, which prove that none is missing and nothing was trained twice."""
    done = stackrl("audit", run.id, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["steps"]["all"]


def assert_finished(slurm: Cluster, run: RunFolder, handle: Handle, count: int, attempts: int) -> None:
    assert slurm.state(handle.job) == "COMPLETED", told(run)
    state = run.state()
    assert (state.status, state.attempt) == ("finished", attempts), told(run)
    assert audited(run) == count
    assert list(run.final.glob("*.safetensors"))


def ended(slurm: Cluster, handle: Handle) -> Callable[[], bool]:
    return lambda: slurm.state(handle.job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.mark.nightly
def test_two_nodes_train_three_steps_with_the_real_engine(slurm: Cluster) -> None:
    run, handle = launched()
    wait_for(lambda: run.state().status == "running", run, "roles")
    second = stackrl("exec", run.id, "--node", "1", "--", "printenv", "SLURMD_NODENAME")
    assert (second.returncode, second.stdout) == (0, "cpu2\n"), second.stderr
    told_of = json.loads(stackrl("status", run.id, "-o", "json").stdout)
    assert told_of["status"] == "running" and set(told_of["roles"]) >= {"engine-0", "trainer-0"}
    wait_for(ended(slurm, handle), run, "the job's end")
    assert_finished(slurm, run, handle, count=3, attempts=1)
    names = {file.stem for file in run.logs(1).glob("*.log")}
    assert names >= {"trainer-0", "engine-0", "orchestrator"}, "logs of all nodes are in one place"
    assert "start 0 on 127.0.0.11,127.0.0.12" in told(run)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["requeued", "warned", "preempted"])
def test_a_run_that_loses_its_nodes_goes_on_from_its_checkpoint(slurm: Cluster, how: str) -> None:
    """No step is lost or trained twice, whoever takes the nodes away."""
    run, handle = launched("stages.main.steps=40")
    wait_for(lambda: steps(run) >= 4, run, "four steps")
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    commands = {
        "requeued": ("scontrol", "requeue", handle.job),
        "warned": ("scancel", "--signal=USR1", "--batch", handle.job),
        "preempted": ("sbatch", *urgent),
    }
    slurm.command(*commands[how])
    wait_for(lambda: run.state().attempt == 2, run, "a second start")
    assert steps(run) < 40, "it was done before its nodes were taken"
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    saved = [event["index"] for event in events if event["event"] == "checkpoint"]
    if how == "warned":
        assert saved[-1] == steps(run), "the step that ran was not saved"
    wait_for(ended(slurm, handle), run, "the job's end")
    assert_finished(slurm, run, handle, count=40, attempts=2)


@pytest.mark.nightly
def test_down_saves_and_leaves_no_process_on_any_node(slurm: Cluster) -> None:
    run, handle = launched("stages.main.steps=400")
    wait_for(lambda: steps(run) >= 2, run, "two steps")
    done = stackrl("down", run.id)
    assert done.returncode == 0, done.stderr
    assert run.state().status == "stopped"
    time.sleep(1)
    assert not [entry for entry in Path("/proc").iterdir() if _is_of(entry, handle.job)]
    saved = sorted(folder.name for folder in (run.path / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{steps(run):06}", "the step that ran was not saved"


def _is_of(entry: Path, job: str) -> bool:
    try:
        return f"\0SLURM_JOB_ID={job}\0".encode() in b"\0" + (entry / "environ").read_bytes()
    except OSError:
        return False
