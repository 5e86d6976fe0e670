"""Run a stack on machines that SkyPilot gets: a cluster of its own, or a managed job where machines may go.

Everything is asked of the `sky` command. A cluster's nodes are reached by ssh, under the names that SkyPilot
writes into ssh's configuration; those of a managed job belong to SkyPilot's controller.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stackrl.runtime.launch import backends
from stackrl.runtime.launch.front import refusals
from stackrl.runtime.launch.handle import Handle, Seen
from stackrl.runtime.launch.money import hourly_noted
from stackrl.runtime.launch.planning.candidates import candidates_of
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.launch.planning.prices import hourly
from stackrl.runtime.launch.sky import command as sky_command
from stackrl.runtime.launch.sky import group as sky_group
from stackrl.runtime.launch.sky import machines
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

SOURCE_FILE, STACK_FILE, TASK_FILE = "task.json", "launched.yaml", "sky.yaml"
"""In the run's folder: the file as it was launched, the resolved one that nodes read, and SkyPilot's own."""


class Sky:
    """The backend (handle.Backend)."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        secrets = _checked(source)
        stack = source.stack.model_copy(update={"device": split.device_of(source.stack, source.task)})
        run = create_run(source.name, source.path, source.hash, stack, asdict(make_plan(source)))
        try:
            run.write(SOURCE_FILE, dict(source.task))
            arguments = _prepare(run, infra, secrets)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return _carry(run, arguments, secrets, new=True, detach=detach)

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
            run.write(SOURCE_FILE, dict(source.task))
        else:
            secrets = sky_command.secrets_of(run.read(SOURCE_FILE), os.environ)
        return _carry(run, _prepare(run, infra, secrets), secrets, new=False, detach=detach)

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        try:
            return _look_at_job(run, handle) if machines.is_job(handle) else _look_at_cluster(run, handle)
        except NoAnswer as error:
            return Seen("unreachable", str(error))

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        not_saved: list[str] = []
        try:
            if not machines.appears(handle):
                return [machines.coming(handle)] if machines.may_come(handle) else []
            not_saved = [] if machines.is_job(handle) else _save(run, handle)
            machines.give_back(run, handle)
            return not_saved
        except NoAnswer as error:
            return [*not_saved, machines.unreached(handle, error)]

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        if machines.is_job(handle):
            raise RunError(
                f"the machines of run {run.id} belong to SkyPilot's controller, which lets nobody in; "
                f"what it says: `stackrl logs {run.id}`"
            )
        if node >= skypilot.nodes(run.read(SOURCE_FILE)):
            raise RunError(f"run {run.id} has {skypilot.nodes(run.read(SOURCE_FILE))} nodes, counted from 0")
        host = handle.job if node == 0 else f"{handle.job}-worker{node}"
        return sky_command.show_program(sky_mirror.command_on_node(host, command))

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


def _prepare(run: RunFolder, infra: str, secrets: Mapping[str, str]) -> list[str]:
    """Write what SkyPilot gets, and note who carries the run; what `sky` is to be told. Raises RunError."""
    task, stack = run.read(SOURCE_FILE), run.stack()
    launches = int(Handle.of(run).details.get("launches", 0)) + 1
    name = sky_task.sky_name(run.id, launches)
    price = hourly_noted(stack.limits, task.get("envs") or {}, _price(task, stack, infra))
    launch = Launch(run.id, name, run.path / STACK_FILE, price, longest_end(run))
    made = documents(task, stack, launch, infra)
    write_durably(launch.file, sky_task.as_yaml([sky_task.resolved(task, stack, launch)]))
    write_durably(run.path / TASK_FILE, sky_task.as_yaml(made))
    managed = sky_task.is_managed(stack, sky_task.pinned(task.get("resources") or {}, infra))
    kind = machines.JOB if managed else machines.CLUSTER
    details = {"infra": infra, "kind": kind, "launches": str(launches), machines.SUBMITTING: "yes"}
    Handle("sky", name, time.time(), launch.hourly, details=details).write(run)
    verb = ["jobs", "launch", "-n"] if managed else ["launch", "-c"]
    said = set(task.get("secrets") or ())
    flags = [part for key in secrets for part in ("--secret" if key in said else "--env", key)]
    return [*verb, name, "-y", "-d", *flags, str(run.path / TASK_FILE)]


def _carry(
    run: RunFolder, arguments: Sequence[str], secrets: Mapping[str, str], *, new: bool, detach: bool
) -> int:
    """Let SkyPilot carry the run; the verb's exit code.

    Where that fails or is interrupted, what came is given back, and a ``new`` run's folder goes. It stays,
    with the way to its machines, where any may still be there, or come.
    """
    code = None
    try:
        code = sky_command.submit(arguments, secrets)
    finally:
        if code is not None and 0 <= code < 128:  # the client has come to its own end, not to a signal
            machines.note_submitted(run)
        if code != 0 and not _left(run) and new:
            shutil.rmtree(run.path, ignore_errors=True)
    return _begun(run, detach) if code == 0 else 1


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


def _left(run: RunFolder) -> bool:
    """Give back what a launch that failed has got; whether something may still be there, or come."""
    handle = Handle.of(run)
    left = machines.coming(handle)  # also where the user does not wait for an answer
    if machines.may_come(handle):
        words = f"waiting for what SkyPilot has begun, at most {machines.COME_LIMIT:.0f} s, to give it back"
        print(f"run {run.id} was interrupted; {words}", file=sys.stderr)
    try:
        if came := machines.appears(handle):
            machines.give_back(run, handle)
        if came or not machines.may_come(handle):
            left = ""
    except NoAnswer as error:
        left = machines.unreached(handle, error)
    finally:
        if left:
            told = f"this may still be there, or come: {left}; see `sky api status`, and end it with"
            print(f"run {run.id} did not start, and {told} `stackrl down {run.id}`", file=sys.stderr)
    return bool(left)


# ---- afterwards


def _begun(run: RunFolder, detach: bool) -> int:
    """Tell how to go on, and without ``detach`` show what the run says until its end."""
    print(run.id)
    verbs = ", ".join(f"`stackrl {verb} {run.id}`" for verb in ("status", "logs -f", "down"))
    print(f"run {run.id} is SkyPilot's now; next: {verbs}", file=sys.stderr)
    if detach:
        return 0
    try:
        code = _follow(Handle.of(run), "--follow")
    except KeyboardInterrupt:
        print(f"run {run.id} goes on; end it with `stackrl down {run.id}`", file=sys.stderr)
        raise
    backends.look(run)  # notes its end, while SkyPilot still knows of it
    return 0 if code == 0 else 1


def _follow(handle: Handle, how: str) -> int:
    verb = ["jobs", "logs", "-n"] if machines.is_job(handle) else ["logs"]
    return sky_command.show([*verb, handle.job, how])


def _look_at_job(run: RunFolder, handle: Handle) -> Seen:
    records = machines.records_of(handle)
    if not records and machines.may_come(handle):
        return Seen("waiting", machines.NOT_LISTED)
    states = [record["status"] for record in records]
    words = ", ".join(f"{record['task_name']} {record['status']}" for record in records)
    if len(records) == 1:
        words = states[0]
    if any(state in machines.WORKING for state in states):
        return Seen("running", words)
    if any(state in machines.WAITING for state in states):
        return Seen("waiting", words)
    why = next((record["failure_reason"] for record in records if record.get("failure_reason")), "")
    done = machines.DONE in states and all(state in (machines.DONE, "CANCELLED") for state in states)
    sky_mirror.settle(run, "finished" if done else "failed", why or words or "SkyPilot does not know its job")
    return Seen("ended", words)


def _look_at_cluster(run: RunFolder, handle: Handle) -> Seen:
    cluster = machines.cluster_of(handle)
    if cluster is None and machines.may_come(handle):
        return Seen("waiting", machines.NOT_LISTED)
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
    """Let a run save itself before its machines go, or, told so before, end at once; why it could not."""
    limit = int(longest_end(run)) + 1
    script = sky_task.saving_script(run.read(SOURCE_FILE), run.id, limit, sky_task.BY_DOWN)
    try:
        sky_mirror.on_node(handle.job, script, limit + 30.0)
        sky_mirror.fetch(run, handle.job, sky_task.remote_home(run.read(SOURCE_FILE)))
    except NoAnswer as error:
        return [f"its node, so that it was not saved: {error}"]
    return []
