"""Run a stack on a Slurm cluster: one job, asked for in the stack's own words, that queues again by itself.

The run's folder is on storage that the nodes see at the same path, as home folders of clusters are. What
happens afterwards is asked of squeue and scontrol, and read in that folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.again import environment_of, go_on
from stackrl.runtime.launch.fork import own_stack
from stackrl.runtime.launch.handle import Handle, Seen
from stackrl.runtime.launch.money import hourly_noted
from stackrl.runtime.launch.runs import explain
from stackrl.runtime.launch.slurm import commands as slurm_commands
from stackrl.runtime.launch.slurm.commands import SlurmError
from stackrl.runtime.launch.slurm.request import Request, overruling, requests_of
from stackrl.runtime.launch.slurm.script import container_options, job_name, log_of, write_script
from stackrl.runtime.monitor.view import follow
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder, create_run, new_token
from stackrl.runtime.stopping import longest_end
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import StackError
from stackrl.schemas.support import unsupported_here

EVERY = 3.0
"""Seconds between two questions to Slurm about a job."""
CANCEL_LIMIT = 120.0
"""Seconds until a cancelled job has left its nodes; Slurm's own patience (KillWait) is 30 s by default."""
_OF_A_JOB = re.compile(r"SLURM_(?!CONF$)|SLURMD_")
"""Variables of a job in which `launch` is typed: they would be taken for wishes."""
_NO_ANSWER = re.compile(r"did not answer|timed out", re.I)
"""What is said where Slurm may have heard a command all the same."""


class Slurm:
    """The backend `slurm`."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        new_token()  # a bad one in the environment is told here, not in a log
        if problems := unsupported_here(source.task):
            raise StackError(source.locate(problems))
        requests = requests_of(source, infra)
        stack, plan = admit(source, here=False)
        run = create_run(source.name, source.path, source.hash, stack, plan, environment_of(source))
        try:
            handle = _submit(run, requests, infra)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return _told(run, handle) if detach else _accompany(self, run, handle)

    def resume(self, run: RunFolder, infra: str, source: LoadedStack | None, *, detach: bool) -> int:
        new_token()
        if source is not None:
            go_on(run, source, environment=environment_of(source), here=False)
        handle = _submit(run, requests_of(source or own_stack(run, ()), infra), infra)
        return _told(run, handle) if detach else _accompany(self, run, handle)

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        try:
            if (wrong := _elsewhere(handle)) is not None:
                return Seen("unreachable", wrong)
            job = slurm_commands.job(handle.job)
        except SlurmError as error:
            return Seen("unreachable", str(error))
        if job is None:
            return Seen("ended", f"Slurm does not know job {handle.job} any more")
        return Seen(job.phase, f"job {handle.job} {job}")

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        seen = self.look(run, handle)
        try:
            if seen.phase == "running" and run.state().attempt:
                slurm_commands.cancel(handle.job, "USR2")
                seen = self._ended(run, handle, longest_end(run) + 30)
            if seen.phase in ("waiting", "running"):
                slurm_commands.cancel(handle.job)
                seen = self._ended(run, handle, CANCEL_LIMIT)
        except SlurmError as error:
            return [str(error)]
        if seen.phase == "ended":
            return []
        return [f"{seen.words}; see `squeue -j {handle.job}`"]

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        nodes = slurm_commands.nodes_of(handle.job) if self.look(run, handle).phase == "running" else []
        if not nodes:
            raise RunError(f"run {run.id} has no nodes now: {self.look(run, handle).words}")
        if not 0 <= node < len(nodes):
            raise RunError(f"run {run.id} has nodes 0 to {len(nodes) - 1}; there is no node {node}")
        part, name = nodes[node]
        words = ["srun", f"--jobid={part}", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--overlap"]
        words += ["--cpu-bind=none", "--quiet", *(["--pty"] if sys.stdin.isatty() else [])]
        words += container_options(run, handle.details.get("image", ""))
        return subprocess.run([*words, *command], env=_environment()).returncode

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        return None

    def _ended(self, run: RunFolder, handle: Handle, limit: float) -> Seen:
        """Wait until the job has ended, for ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while (seen := self.look(run, handle)).phase in ("waiting", "running"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return seen


BACKEND = Slurm()


def _submit(run: RunFolder, requests: Sequence[Request], infra: str) -> Handle:
    """Submit the first request that Slurm would ever start. Raises RunError with Slurm's own words."""
    (run.path / "logs").mkdir(mode=0o700, exist_ok=True)
    refusals: list[str] = []
    said = run.read("run.json").get("environment", {})
    token = new_token()
    hourly = hourly_noted(run.stack().limits, _environment() | said, 0.0)
    for request in requests:
        script = write_script(run, request, said)
        environment = _environment(overruling(request)) | {TOKEN_VARIABLE: token}
        try:
            slurm_commands.check(script, environment)
        except SlurmError as error:
            refusals.append(_refused(request, error.words))
            continue
        job, cluster = _queue(run, script, environment), slurm_commands.cluster()
        details = {"infra": infra, "cluster": cluster, "image": request.image}
        handle = Handle("slurm", job, time.time(), hourly=hourly, details=details)
        handle.write(run)
        return handle
    raise RunError("\n".join(dict.fromkeys(refusals)))


def _queue(run: RunFolder, script: Path, environment: Mapping[str, str]) -> str:
    """Submit ``script``; the id of its job. Where that fails, a job that Slurm has made all the same is
    cancelled. Raises RunError."""
    try:
        return slurm_commands.submit(script, environment)
    except KeyboardInterrupt:
        _take_back(script)
        raise
    except SlurmError as error:
        if jobs := _take_back(script):
            raise RunError(f"{error}; it had queued job {jobs[0]}, which is cancelled: try again") from None
        if not _NO_ANSWER.search(error.words):
            raise
        where = f"squeue --me -n {job_name(run)}"
        raise RunError(f"{error}; the job may be queued: see `{where}`, and end it with `scancel`") from None


def _take_back(script: Path) -> list[str]:
    """Cancel the jobs of ``script``, which is one run's alone; their ids, or none where Slurm does not tell.

    Raises RunError where one is left.
    """
    try:
        jobs = slurm_commands.queued(script)
    except SlurmError:
        return []
    for job in jobs:
        try:
            slurm_commands.cancel(job)
        except SlurmError as error:
            raise RunError(
                f"job {job} is queued, and is not to be: end it with `scancel {job}`; {error}"
            ) from None
    return jobs


def _refused(request: Request, words: str) -> str:
    """Slurm's reason, and what the cluster has instead."""
    asked = " and ".join(f"{part.nodes} × {' '.join(part.options)}" for part in request.parts)
    names = dict.fromkeys(part.partition for part in request.parts)
    known = slurm_commands.partitions()
    if unknown := [name for name in names if name and name not in known]:
        return f"Slurm refuses the job: {words}; there is no {unknown[0]}, but {', '.join(known)}"
    there = "; ".join(f"{name or known[0]} has {_hardware(name)}" for name in names)
    return f"Slurm refuses the job: {words}; asked for {asked}; {there}; see `sinfo -o '%P %D %c %m %G %f'`"


def _hardware(partition: str) -> str:
    kinds = []
    for node in slurm_commands.hardware(partition):
        gpus = [f"{kind or 'GPU'}:{count}" for kind, count in node.gpus.items()] or ["no GPUs"]
        kinds.append(f"nodes with {', '.join(gpus)}, {node.cpus} cores and {node.memory / 1024:.0f} GiB")
    return " and ".join(dict.fromkeys(kinds)) or "no nodes"


def _environment(without: Collection[str] = ()) -> dict[str, str]:
    """This process's, without what Slurm would take for wishes where `launch` is typed inside a job."""
    return {
        name: value for name, value in os.environ.items() if name not in without and not _OF_A_JOB.match(name)
    }


def _elsewhere(handle: Handle) -> str | None:
    """Why this machine cannot ask for a job; None where it can."""
    cluster, here = handle.details.get("cluster", ""), slurm_commands.cluster()
    return None if cluster in ("", here) else f"job {handle.job} is of cluster {cluster}; this one is {here}"


def _told(run: RunFolder, handle: Handle) -> int:
    print(run.id)
    print(
        f"run {run.id} is job {handle.job} of Slurm; watch it with `stackrl watch {run.id}`, "
        f"end it with `stackrl down {run.id}`",
        file=sys.stderr,
    )
    return 0


def _accompany(backend: Slurm, run: RunFolder, handle: Handle) -> int:
    """Show the run to its end: 0 where it finished, else 1. Ctrl-C leaves it alone, and returns 130."""
    print(f"run {run.id} is job {handle.job} of Slurm; Ctrl-C leaves it there", file=sys.stderr)
    goes_on = _asking(backend, run, handle)
    attempt = run.state().attempt
    try:
        while run.state().attempt == attempt and goes_on():
            time.sleep(0.5)
        follow(run, goes_on, Console(stderr=True), handle.submitted)
    except KeyboardInterrupt:
        print(f"\nno longer watching; {explain(run)}", file=sys.stderr)
        return 130
    if run.state().attempt == attempt:
        print(f"run {run.id} did not start; see {log_of(run)}", file=sys.stderr)
        return 1
    print(explain(run), file=sys.stderr)
    if run.state().status != "finished":
        return 1
    print(run.final)
    return 0


def _asking(backend: Slurm, run: RunFolder, handle: Handle) -> Callable[[], bool]:
    """Whether the job goes on, asked of Slurm every few seconds; what it waits for is told."""
    asked, before, answer = 0.0, "", True

    def goes_on() -> bool:
        nonlocal asked, before, answer
        if time.monotonic() - asked < EVERY:
            return answer
        seen, asked = backend.look(run, handle), time.monotonic()
        if seen.words != before and (seen.phase == "waiting" or not before):
            print(seen.words, file=sys.stderr)
        before, answer = seen.words, seen.phase != "ended"
        return answer

    return goes_on
