"""Jobs on a real Slurm, with small programs as roles: ends, signals, requeues, and what can be asked."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from fake_roles import FAILS, WORKS, make_run, process, wait_until

import stacks
from stackrl import cli
from stackrl.runtime.launch import runs
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.slurm import backend
from stackrl.runtime.launch.slurm import commands as slurm_commands
from stackrl.runtime.launch.slurm import script as slurm_script
from stackrl.runtime.launch.slurm.backend import BACKEND
from stackrl.runtime.launch.slurm.request import Part, Request
from stackrl.runtime.run import RunError, RunFolder, all_runs
from stackrl.runtime.stopping import longest_end

pytestmark = pytest.mark.slow

SERVES_ONCE = """
import pathlib, sys, time
life = pathlib.Path(sys.argv[1], "life")
if life.exists():
    print("another life", flush=True)
else:
    life.touch()
    time.sleep(600)
"""
"""Works until it is ended; started again, it is done at once."""
FAILS_THEN = SERVES_ONCE.replace('print("another life", flush=True)', 'sys.exit("error: another life")')
"""Works until it is ended; started again, it fails."""


def submitted(run: RunFolder, *options: str, nodes: int = 1, partition: str = "cpu") -> Handle:
    part = Part(partition, nodes, ("--cpus-per-task=1", "--mem=500M"))
    return backend._submit(run, [Request((part,), options)], "slurm")


def serving(program: str = SERVES_ONCE) -> RunFolder:
    return make_run(process("orchestrator", program, "RUN"))


def begun(run: RunFolder) -> None:
    """Wait until its role works."""
    wait_until((run.path / "life").exists, 60)


def ended(run: RunFolder, handle: Handle, limit: float = 60) -> str:
    """Wait for the job's end; what Slurm says of it."""
    deadline = time.monotonic() + limit
    while (seen := BACKEND.look(run, handle)).phase != "ended":
        assert time.monotonic() < deadline, f"{seen.words}\n{log(run)}"
        time.sleep(0.3)
    return seen.words


def log(run: RunFolder) -> str:
    return (run.path / "logs" / "node.log").read_text()


def processes_of(job: str) -> list[str]:
    """Command lines of all processes that know that they are of a job of this cluster."""
    marks = [
        f"\0{name}\0".encode() for name in (f"SLURM_JOB_ID={job}", f"SLURM_CONF={os.environ['SLURM_CONF']}")
    ]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and all(mark in _environment(entry) for mark in marks):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def _environment(entry: Path) -> bytes:
    return b"\0" + (entry / "environ").read_bytes()


def test_a_run_that_finishes_is_a_job_that_completes(slurm) -> None:
    run = make_run(process("orchestrator", WORKS))
    handle = submitted(run)
    assert ended(run, handle).endswith("COMPLETED")
    assert run.state().status == "finished" and run.state().attempt == 1
    assert "start 0 on 127.0.0.11" in log(run) and "ended with 0" in log(run)
    assert Handle.of(run) == handle
    script = (run.path / "slurm.sh").read_text()
    assert "STACKRL_TOKEN" not in script and sys.executable in script
    assert (run.path / "slurm.sh").stat().st_mode & 0o777 == 0o600


def test_a_run_that_fails_is_a_job_that_fails_and_does_not_queue_again(slurm) -> None:
    run = make_run(process("orchestrator", FAILS))
    handle = submitted(run)
    assert "FAILED" in ended(run, handle)
    assert run.state().status == "failed" and "queues again" not in log(run)


def test_down_saves_ends_the_job_and_leaves_no_process(slurm) -> None:
    run = serving()
    handle = submitted(run)
    begun(run)
    assert BACKEND.look(run, handle).words == f"job {handle.job} RUNNING on cpu1"
    assert processes_of(handle.job)
    assert runs.down(run.id) == 0
    assert run.state().status == "stopped" and "told to end" in log(run)
    assert run.state().roles == {"orchestrator": "ended"}
    assert not processes_of(handle.job)
    assert not slurm.command("squeue", "-h")
    before = run.state()
    assert runs.down(run.id) == 0 and run.state() == before


def test_what_a_shell_wishes_of_sbatch_does_not_overrule_the_script(
    slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = {
        "PARTITION": "gpux", "TIMELIMIT": "7", "EXPORT": "NONE", "NO_REQUEUE": "1", "SIGNAL": "USR2@5",
        "CLUSTERS": "spire", "WAIT": "1", "ARRAY_INX": "0-3", "JOB_NAME": "mine", "COMMENT": "x",
        "OUTPUT": "/dev/null", "MEM_PER_CPU": "1",
    }  # fmt: skip
    for name, value in wishes.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    run = make_run(process("orchestrator", WORKS))
    handle = submitted(run, "--time=60")
    shown = slurm.command("scontrol", "show", "job", handle.job)
    for fact in ("Partition=cpu ", "TimeLimit=01:00:00", "Requeue=1", f"StdOut={run.path}/logs/node.log"):
        assert fact in shown, shown
    assert ended(run, handle).endswith("COMPLETED"), "its token was not exported"


@pytest.mark.parametrize("partitions", [("cpu",), ("cpu", "gpu")])
def test_a_job_whose_submission_was_not_answered_is_cancelled(
    slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: tuple[str, ...]
) -> None:
    """With all its parts, and no job of another run of the same stack."""
    other = submitted(serving(), "--begin=now+3600")
    folder, real = tmp_path / "bin", shutil.which("sbatch")
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\n{real} "$@"\n[ "$1" = --test-only ] || exec sleep 60\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(slurm_commands, "LIMIT", 5.0)
    run = serving()
    with pytest.raises(RunError, match=r"did not answer within 5 s.* had queued job \d+, which is cancelled"):
        parts = tuple(Part(name, 1, ("--cpus-per-task=1",)) for name in partitions)
        backend._submit(run, [Request(parts, ("--begin=now+3600",))], "slurm")
    assert slurm.command("squeue", "-h", "-o", "%A").split() == [other.job]
    assert not (run.path / "handle.json").exists()


def test_a_held_job_waits_whatever_its_state_is_called(slurm) -> None:
    run = serving()
    handle = submitted(run)
    begun(run)
    slurm.command("scontrol", "requeuehold", "State=SpecialExit", handle.job)
    deadline = time.monotonic() + 60
    while "SPECIAL_EXIT" not in (seen := BACKEND.look(run, handle)).words:
        assert seen.phase != "ended" and time.monotonic() < deadline, seen
        time.sleep(0.3)
    assert seen.phase == "waiting"
    assert BACKEND.down(run, handle) == []


def test_down_takes_a_waiting_job_from_the_queue(slurm) -> None:
    run = serving()
    handle = submitted(run, "--begin=now+3600")
    seen = BACKEND.look(run, handle)
    assert seen.phase == "waiting" and seen.words == f"job {handle.job} PENDING (BeginTime)"
    assert runs.down(run.id) == 0
    assert BACKEND.look(run, handle).phase == "ended" and run.state().status == "stopped"
    assert not (run.path / "logs" / "node.log").exists()


def test_the_signal_before_the_time_limit_saves_and_queues_again(slurm) -> None:
    run = serving()
    handle = submitted(run)
    begun(run)
    slurm.command("scancel", "--signal=USR1", "--batch", handle.job)
    assert ended(run, handle).endswith("COMPLETED")
    assert (run.state().attempt, run.state().status) == (2, "finished")
    assert "taken away" in log(run) and "ended with 75; queues again" in log(run)
    assert "start 1 on" in log(run), "the log of the first start is gone, or there was no second"


@pytest.mark.nightly
def test_slurm_itself_warns_before_the_time_limit(slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a minute early: a limit is two minutes at least in its eyes."""
    monkeypatch.setattr(slurm_script, "MARGIN", 30 - int(longest_end(serving())))
    run = serving()
    handle = submitted(run, "--time=2")
    assert "#SBATCH --signal=B:USR1@30\n" in (run.path / "slurm.sh").read_text()
    assert ended(run, handle, 180).endswith("COMPLETED")
    assert (run.state().attempt, run.state().status) == (2, "finished")
    assert "taken away" in log(run) and "ended with 75; queues again" in log(run)


def test_a_requeued_job_goes_on_with_the_same_run(slurm) -> None:
    run = serving()
    handle = submitted(run)
    begun(run)
    slurm.command("scontrol", "requeue", handle.job)
    assert ended(run, handle).endswith("COMPLETED")
    assert (run.state().attempt, run.state().status) == (2, "finished")


@pytest.mark.nightly
def test_a_preempted_job_queues_again_once_for_each_time_that_it_is_preempted(slurm) -> None:
    """The partition gives it a minute to leave; the other job has both nodes meanwhile. Then it fails,
    which is no reason to start it a third time."""
    run = serving(FAILS_THEN)
    handle = submitted(run)
    begun(run)
    urgent = slurm.command(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"),
        "--wrap=sleep 2",
    )
    assert "FAILED" in ended(run, handle, 90)
    assert slurm.state(urgent) == "COMPLETED"
    assert (run.state().attempt, run.state().status) == (2, "failed")
    assert log(run).count("queues again") == 1


@pytest.mark.nightly
def test_a_run_that_was_lost_queues_again(slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_script, "PATIENCE", 0)
    run = serving()
    handle = submitted(run)
    begun(run)
    os.kill(supervisor_of(run), signal.SIGKILL)
    wait_until(lambda: run.state().attempt == 2, 60)
    assert ended(run, handle).endswith("COMPLETED")
    assert "ended with 75; queues again" in log(run)


def test_a_cancelled_job_does_not_queue_again(slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its nodes say that they were lost: Slurm has told them to end, as it told the script."""
    lost = 'srun bash -c \'trap "exit 75" TERM; touch "$0/life"; sleep 600 & wait\' "$run"'
    monkeypatch.setattr(slurm_script, "PATIENCE", 0)
    monkeypatch.setattr(slurm_script, "_step", lambda run, request: [lost])
    run = serving()
    handle = submitted(run)
    begun(run)
    slurm.command("scancel", handle.job)
    assert ended(run, handle).endswith("CANCELLED")
    assert "ended with 75" in log(run) and "queues again" not in log(run)
    assert not processes_of(handle.job)


def supervisor_of(run: RunFolder) -> int:
    """The child of the node program that starts the roles."""
    keeper = run.keeper()
    assert keeper is not None
    (child,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(child)


def test_a_command_runs_on_a_node_of_the_run(slurm, capfd: pytest.CaptureFixture[str]) -> None:
    run = serving()
    handle = submitted(run)
    begun(run)
    assert BACKEND.execute(run, handle, ["sh", "-c", "echo on $SLURMD_NODENAME; exit 3"], 0) == 3
    assert capfd.readouterr().out == "on cpu1\n"
    with pytest.raises(RunError, match="there is no node 1"):
        BACKEND.execute(run, handle, ["true"], 1)
    assert BACKEND.down(run, handle) == []
    with pytest.raises(RunError, match="has no nodes now: job"):
        BACKEND.execute(run, handle, ["true"], 0)


def test_a_cluster_that_cannot_be_asked_is_unreachable(slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    run = serving()
    handle = submitted(run, "--begin=now+3600")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        seen = BACKEND.look(run, handle)
        assert seen.phase == "unreachable" and "squeue" in seen.words
        assert BACKEND.down(run, handle) == [f"{seen.words}; see `squeue -j {handle.job}`"]
    assert run.state().status == "created"
    elsewhere = Handle("slurm", handle.job, details={"cluster": "spire"})
    assert BACKEND.look(run, elsewhere).phase == "unreachable"
    assert BACKEND.look(run, Handle("slurm", "999999", details={})).phase == "ended"


def test_a_run_is_launched_with_its_folder_and_resumed_as_another_job(
    slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not to begin now, so that no engine has to start."""
    later = "config: {slurm: {sbatch_options: {begin: now+3600}}}\nsecrets: {STACKRL_TOKEN: null}\n"
    machines = f"num_nodes: 1\nresources: {{infra: slurm, cpus: 1+}}\n{later}"
    small = "    trainer: {sequence_length: 512}\n    inference: {max_model_length: 512}\n    environments:\n"
    file = stacks.write(tmp_path, ("num_nodes: 1\n", machines), ("    environments:\n", small))
    monkeypatch.setenv("STACKRL_TOKEN", "a-token-that-nobody-is-to-see")
    assert cli.main(["launch", str(file), "--infra", "slurm/tower/cpu", "-d", "--set", "seed=7"]) == 0
    (run,) = all_runs()
    first = Handle.of(run)
    assert (first.backend, first.hourly) == ("slurm", 0.0)
    assert first.details == {"infra": "slurm/tower/cpu", "cluster": "tower", "image": ""}
    assert cli.main(["down", run.id]) == 0
    assert cli.main(["launch", "--resume", run.id, "-d"]) == 0
    second = Handle.of(run)
    assert second.job != first.job and BACKEND.look(run, second).phase == "waiting"
    assert run.stack().seed == 7 and [one.id for one in all_runs()] == [run.id]
    assert cli.main(["down", run.id]) == 0
    assert capsys.readouterr().out.split() == [run.id, run.id]
    token = b"a-token-that-nobody-is-to-see"
    assert not [file for file in run.path.rglob("*") if file.is_file() and token in file.read_bytes()]


def test_launch_shows_what_the_job_waits_for_and_the_run_to_its_end(
    slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(process("orchestrator", WORKS))
    handle = submitted(run, "--begin=now+5")
    assert backend._accompany(BACKEND, run, handle) == 0
    out, err = capfd.readouterr()
    assert out.strip() == str(run.final)
    assert f"job {handle.job} PENDING (BeginTime)" in err
    assert f"run {run.id} is finished" in err and f"run {run.id} finished in" in err
