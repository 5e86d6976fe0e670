"""Slurm's commands, each with a limit, and what they say in their own words. Accounting may be off."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from stackrl.runtime.run import RunError

LIMIT = 60.0
"""Seconds for any command; slurmctld is slow when many ask it."""
AT_WORK = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
ENDED = frozenset({
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "PREEMPTED", "REVOKED",
})  # fmt: skip
"""States that no job leaves. What is neither these nor AT_WORK waits, such as SPECIAL_EXIT: it is held."""
_UNKNOWN_JOB = "Invalid job id"
_HAS_ENDED = f"{_UNKNOWN_JOB}|already complet|is not running|finished"


class SlurmError(RunError):
    """A command of Slurm failed. ``words``: what it said."""

    def __init__(self, command: str, words: str) -> None:
        super().__init__(f"{command}: {words}")
        self.words = words


@dataclass(frozen=True)
class Job:
    """A job as squeue lists it."""

    state: str
    """PENDING, RUNNING, COMPLETED …"""
    reason: str
    """Why it waits, or ended; None where there is nothing to say."""
    nodes: str
    """As Slurm writes lists of nodes: gpu[1-3,7]."""

    @property
    def phase(self) -> Literal["waiting", "running", "ended"]:
        return "running" if self.state in AT_WORK else "ended" if self.state in ENDED else "waiting"

    def __str__(self) -> str:
        if self.state in AT_WORK:
            return f"{self.state} on {self.nodes}" if self.nodes else self.state
        return self.state if self.reason in ("", "None") else f"{self.state} ({self.reason})"


@dataclass(frozen=True)
class Hardware:
    """One kind of node of a partition."""

    cpus: int
    memory: int
    """MiB."""
    gpus: Mapping[str, int]
    """How many of each type; the type is empty where the cluster names none."""


def check(script: Path, environment: Mapping[str, str]) -> None:
    """Let Slurm say whether it would ever start ``script``. Raises SlurmError."""
    call("sbatch", "--test-only", str(script), environment=environment)


def submit(script: Path, environment: Mapping[str, str]) -> str:
    """Queue ``script``; the id of its job. Raises SlurmError."""
    return call("sbatch", "--parsable", str(script), environment=environment).split(";")[0].strip()


def queued(script: Path) -> list[str]:
    """Ids of the user's jobs of ``script`` that have not ended, the first part of one first.

    Raises SlurmError.
    """
    listed = call("squeue", "--me", "--noheader", "--format=%A|%o").splitlines()
    jobs = (line.strip().partition("|") for line in listed)
    return sorted((number for number, _, command in jobs if command == str(script)), key=int)


def job(number: str) -> Job | None:
    """The job, and of one with several parts the first; None where Slurm does not know it any more.

    Raises SlurmError where it cannot be asked.
    """
    try:
        listed = call("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r|%N")
    except SlurmError as error:
        if _UNKNOWN_JOB in error.words:
            return None
        raise
    if not listed.strip():
        return None
    return Job(*listed.splitlines()[0].strip().split("|"))


def nodes_of(number: str) -> list[tuple[str, str]]:
    """(job id, name) of every node of a running job in order of rank; parts of a job have ids of their own.

    Raises SlurmError.
    """
    listed = call("squeue", "--noheader", f"--jobs={number}", "--format=%A|%N").splitlines()
    parts = sorted({(int(part), nodes) for part, _, nodes in (line.partition("|") for line in listed)})
    return [
        (str(part), node)
        for part, nodes in parts
        if nodes.strip()
        for node in call("scontrol", "show", "hostnames", nodes.strip()).split()
    ]


def cancel(number: str, signal: str = "") -> None:
    """End a job, or send ``signal`` to its script alone. Fine where it has ended. Raises SlurmError."""
    words = [f"--signal={signal}", "--batch"] if signal else []
    try:
        call("scancel", *words, number)
    except SlurmError as error:
        if not re.search(_HAS_ENDED, error.words, re.I):
            raise


@cache
def cluster() -> str:
    """The name of the cluster that this machine belongs to. Raises SlurmError."""
    shown = call("scontrol", "show", "config")
    found = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.M)
    return found[1] if found else ""


def partitions() -> list[str]:
    """Names, the default one first. Raises SlurmError."""
    names = call("sinfo", "--noheader", "--format=%P").split()
    return [
        name.rstrip("*") for name in sorted(dict.fromkeys(names), key=lambda name: not name.endswith("*"))
    ]


def hardware(partition: str = "") -> list[Hardware]:
    """Kinds of nodes of a partition, or of the default one. Empty where there is no such partition.

    Raises SlurmError.
    """
    chosen = partition or next(iter(partitions()), "")
    listed = call("sinfo", "--noheader", f"--partition={chosen}", "--format=%c|%m|%G").split()
    found = []
    for cpus, memory, resources in (line.split("|", 2) for line in listed):
        found.append(Hardware(_number(cpus), _number(memory), _gpus(resources)))
    return found


def default_time(partition: str = "") -> str:
    """How long a job of a partition may take that does not say, as Slurm writes it; empty where unknown.

    Raises SlurmError.
    """
    chosen = partition or next(iter(partitions()), "")
    listed = call("sinfo", "--noheader", f"--partition={chosen}", "--format=%L|%l").split()
    default, _, most = listed[0].partition("|") if listed else ("", "", "")
    return most if default == "n/a" else default


def takes_containers() -> bool:
    """Whether srun has the option of pyxis. Raises SlurmError."""
    return "--container-image" in call("srun", "--help")


def call(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints. Raises SlurmError with its words."""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            env=environment,
        )
    except FileNotFoundError:
        raise SlurmError(
            program,
            "there is no such command here; type this on a machine of a Slurm cluster (its login node)",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(program, f"it did not answer within {LIMIT:.0f} s; see `sinfo`") from None
    if done.returncode:
        raise SlurmError(program, words_of(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def words_of(errors: str) -> str:
    """What a command has said, without its name in front of each line."""
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in errors.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _gpus(resources: str) -> dict[str, int]:
    """The GPUs of sinfo's `gpu:h100:8(S:0-1),nvme:1`."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"gpu:(?:([^:,()]+):)?(\d+)", resources):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _number(text: str) -> int:
    """sinfo adds `+` where nodes of one line differ: at least."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0
