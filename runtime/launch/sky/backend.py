"""Run a stack on machines that SkyPilot gets: a cluster of its own, or a managed job where machines may go.

Everything is asked of the `sky` command. A cluster's nodes are reached by ssh, under the names that SkyPilot
writes into ssh's configuration; those of a managed job belong to SkyPilot's controller.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stackrl.runtime.launch.front import refusals
from stackrl.runtime.launch.handle import Handle, Seen
from stackrl.runtime.launch.money import hourly_noted
from stackrl.runtime.launch.planning.candidates import candidates_of
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.launch.planning.prices import hourly
from stackrl.runtime.launch.sky import command as sky_command
from stackrl.runtime.launch.sky import group as sky_group
from stackrl.runtime.launch.sky import mirror as sky_mirror
from stackrl.runtime.launch.sky import task as sky_task
from stackrl.runtime.launch.sky.command import NoAnswer
from stackrl.runtime.launch.sky.task import Launch
from stackrl.runtime.run import RunError, RunFolder, create_run, write_durably
from stackrl.runtime.stopping import longest_end
from stackrl.schemas import skypilot, split
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import StackError
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack

CLUSTER, JOB = "cluster", "job"
"""What SkyPilot makes of a launch; a job may be a group of jobs."""
SOURCE_FILE, STACK_FILE, TASK_FILE = "task.json", "launched.yaml", "sky.yaml"
"""In the run's folder: the file as it was launched, the resolved one that nodes read, and SkyPilot's own."""
WAITING = frozenset({"PENDING", "SUBMITTED", "STARTING", "RECOVERING"})
WORKING = frozenset({"RUNNING", "WINDING_DOWN", "CANCELLING"})
DONE = "SUCCEEDED"


class Sky:
    """The backend (handle.Backend)."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        secrets = _checked(source)
        stack = source.stack.model_copy(update={"device": split.device_of(source.stack, source.task)})
        run = create_run(source.name, source.path, source.hash, stack, asdict(make_plan(source)))
        run.write(SOURCE_FILE, _without_secrets(source.task))
        started = False
        try:
            started = _start(run, infra, secrets)
        finally:
            if not started and not _left(run):
                shutil.rmtree(run.path, ignore_errors=True)
        return _begun(run, detach) if started else 1

    def resume(self, run: RunFolder, infra: str, source: LoadedStack | None, *, detach: bool) -> int:
        if source is None and not (run.path / SOURCE_FILE).exists():
            raise RunError(
                f"run {run.id} was not on machines of SkyPilot's; name its stack: "
                f"`stackrl launch FILE --resume {run.id} --infra {infra}`"
            )
        if not (source.stack if source else run.stack()).checkpoint.path:
            raise RunError(
                f"the checkpoints of run {run.id} are in its folder, which new machines do not see; only a "
                "run with a durable checkpoint.path, such as a mounted bucket, goes on elsewhere"
            )
        if source is not None:
            secrets = _checked(source)
            run.write_source(source.path, source.hash, {})
            run.write_plan(source.stack, asdict(make_plan(source)))
            run.write(SOURCE_FILE, _without_secrets(source.task))
        else:
            secrets = sky_command.secrets_of(run.read(SOURCE_FILE), os.environ)
        started = False
        try:
            started = _start(run, infra, secrets)
        finally:
            if not started:
                _left(run)
        return _begun(run, detach) if started else 1

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        try:
            return _look_at_job(run, handle) if _is_job(handle) else _look_at_cluster(run, handle)
        except NoAnswer as error:
            return Seen("unreachable", str(error))

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        try:
            if not _is_there(handle):
                return []
            not_saved = [] if _is_job(handle) else _save(run, handle)
            _give_back(handle)
            return not_saved
        except NoAnswer as error:
            return [_unreached(handle, error)]

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        if _is_job(handle):
            raise RunError(
                f"the machines of run {run.id} belong to SkyPilot's controller, which lets nobody in; "
                f"what it says: `stackrl logs {run.id}`"
            )
        if node >= skypilot.nodes(run.read(SOURCE_FILE)):
            raise RunError(f"run {run.id} has {skypilot.nodes(run.read(SOURCE_FILE))} nodes, counted from 0")
        host = handle.job if node == 0 else f"{handle.job}-worker{node}"
        return sky_command.show_program([*sky_mirror.SSH, host, shlex.join(command)])

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        return _follow(handle, "--follow" if follow else "--no-follow")


BACKEND = Sky()


# ---- starting


def _checked(source: LoadedStack) -> dict[str, str]:
    """The values of the secrets, if the stack can be launched. Raises StackError and RunError."""
    if problems := refusals(source):
        raise StackError(problems)
    sky_command.sky()
    return sky_command.secrets_of(source.task, os.environ)


def _start(run: RunFolder, infra: str, secrets: Mapping[str, str]) -> bool:
    """Write what SkyPilot gets, note who carries the run, and let it be carried; whether it is."""
    task, stack = run.read(SOURCE_FILE), run.stack()
    launches = int(Handle.of(run).details.get("launches", 0)) + 1
    name = sky_task.sky_name(run.id, launches)
    price = hourly_noted(stack.limits, task.get("envs") or {}, _price(task, stack, infra))
    launch = Launch(run.id, name, run.path / STACK_FILE, price, longest_end(run))
    made = documents(task, stack, launch, infra)
    write_durably(launch.file, sky_task.as_yaml([sky_task.resolved(task, stack, launch)]))
    write_durably(run.path / TASK_FILE, sky_task.as_yaml(made))
    kind = JOB if sky_task.is_managed(stack, sky_task.pinned(task.get("resources") or {}, infra)) else CLUSTER
    details = {"infra": infra, "kind": kind, "launches": str(launches)}
    Handle("sky", name, time.time(), launch.hourly, details=details).write(run)
    verb = ["jobs", "launch", "-n"] if kind == JOB else ["launch", "-c"]
    said = set(task.get("secrets") or ())
    flags = [part for key in secrets for part in ("--secret" if key in said else "--env", key)]
    command = [*verb, name, "-y", "-d", *flags, str(run.path / TASK_FILE)]
    return sky_command.submit(command, secrets) == 0


def documents(task: Task, stack: Stack, launch: Launch, infra: str) -> list[dict[str, Any]]:
    """What SkyPilot gets: one task, or a group of jobs. Raises RunError."""
    if split.is_mixed(stack):
        return sky_group.documents(task, stack, launch, infra)
    made = sky_task.submitted(task, launch)
    resources = sky_task.pinned(task.get("resources") or {}, infra)
    managed = sky_task.is_managed(stack, resources)
    made["resources"] = sky_task.recovering(resources) if managed else sky_task.given_back(resources)
    return [{**made, "name": launch.name}]


def _price(task: Task, stack: Stack, infra: str) -> float | None:
    """Dollars per hour of the dearest machines that SkyPilot may take; None where one's price is unknown."""
    pinned = {**task, "resources": sky_task.pinned(task.get("resources") or {}, infra)}
    prices = [hourly(candidate) for candidate in candidates_of(stack, pinned)]
    return None if None in prices else max(prices, default=None)


def _without_secrets(task: Task) -> dict[str, Any]:
    secrets = task.get("secrets")
    return {**task, "secrets": dict.fromkeys(secrets)} if isinstance(secrets, Mapping) else dict(task)


def _left(run: RunFolder) -> bool:
    """Give back what a launch that failed has got; whether something may still be there."""
    handle = Handle.of(run)
    try:
        if handle.backend == "sky" and _is_there(handle):
            _give_back(handle)
    except NoAnswer as error:
        told = f"this may still be there: {_unreached(handle, error)}; try `stackrl down {run.id}`"
        print(f"run {run.id} did not start, and {told}", file=sys.stderr)
        return True
    return False


# ---- afterwards


def _begun(run: RunFolder, detach: bool) -> int:
    """Tell how to go on, and without ``detach`` show what the run says until its end."""
    print(run.id)
    verbs = ", ".join(f"`stackrl {verb} {run.id}`" for verb in ("status", "logs -f", "down"))
    print(f"run {run.id} is SkyPilot's now; next: {verbs}", file=sys.stderr)
    if detach:
        return 0
    try:
        return 0 if _follow(Handle.of(run), "--follow") == 0 else 1
    except KeyboardInterrupt:
        print(f"run {run.id} goes on; end it with `stackrl down {run.id}`", file=sys.stderr)
        raise


def _follow(handle: Handle, how: str) -> int:
    verb = ["jobs", "logs", "-n"] if _is_job(handle) else ["logs"]
    return sky_command.show([*verb, handle.job, how])


def _is_job(handle: Handle) -> bool:
    return handle.details.get("kind") == JOB


def _records(handle: Handle) -> list[dict[str, Any]]:
    """What SkyPilot knows of a managed job, task by task. Raises NoAnswer."""
    queue = sky_command.ask(["jobs", "queue", "--all"])
    return [record for record in queue if record.get("job_name") == handle.job]


def _cluster(handle: Handle) -> dict[str, Any] | None:
    """What SkyPilot knows of a cluster, having asked its cloud; None where there is none. Raises NoAnswer."""
    clusters = sky_command.ask(["status", "--refresh"])
    return next((cluster for cluster in clusters if cluster.get("name") == handle.job), None)


def _is_there(handle: Handle) -> bool:
    """Whether SkyPilot has, or is about to have, machines for it. Raises NoAnswer."""
    if _is_job(handle):
        return any(record["status"] in WAITING | WORKING for record in _records(handle))
    return _cluster(handle) is not None


def _give_back(handle: Handle) -> None:
    """Raises NoAnswer where SkyPilot does not end it."""
    verb = ["jobs", "cancel", "-n"] if _is_job(handle) else ["down"]
    sky_command.do([*verb, handle.job, "-y"], sky_command.END_LIMIT)


def _unreached(handle: Handle, error: NoAnswer) -> str:
    return f"SkyPilot's {handle.details.get('kind', CLUSTER)} {handle.job}: {error}"


def _look_at_job(run: RunFolder, handle: Handle) -> Seen:
    records = _records(handle)
    states = [record["status"] for record in records]
    words = ", ".join(f"{record['task_name']} {record['status']}" for record in records)
    if len(records) == 1:
        words = states[0]
    if any(state in WORKING for state in states):
        return Seen("running", words)
    if any(state in WAITING for state in states):
        return Seen("waiting", words)
    why = next((record["failure_reason"] for record in records if record.get("failure_reason")), "")
    done = DONE in states and all(state in (DONE, "CANCELLED") for state in states)
    sky_mirror.settle(run, "finished" if done else "failed", why or words or "SkyPilot does not know its job")
    return Seen("ended", words)


def _look_at_cluster(run: RunFolder, handle: Handle) -> Seen:
    cluster = _cluster(handle)
    if cluster is None:
        sky_mirror.settle(run, "stopped", "its machines are gone, and nobody saw the end")
        return Seen("ended")
    words = " ".join(filter(None, (cluster["status"], cluster.get("cloud"), cluster.get("region"))))
    if cluster["status"] != "UP":
        return Seen("waiting", words)
    try:
        sky_mirror.fetch(run, handle.job, sky_task.remote_home(run.read(SOURCE_FILE)))
    except NoAnswer as error:
        words += f"; its node does not answer: {error}"
    return Seen("running", words)


def _save(run: RunFolder, handle: Handle) -> list[str]:
    """Let a run save itself before its machines go; in words, why it could not."""
    limit = int(longest_end(run)) + 1
    script = sky_task.saving_script(run.read(SOURCE_FILE), run.id, limit)
    try:
        sky_command.quietly([*sky_mirror.SSH, handle.job, "bash -s"], limit + 30.0, script)
        sky_mirror.fetch(run, handle.job, sky_task.remote_home(run.read(SOURCE_FILE)))
    except NoAnswer as error:
        return [f"its node, so that it was not saved: {error}"]
    return []
