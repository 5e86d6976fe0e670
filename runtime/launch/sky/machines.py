"""What SkyPilot has for a run, a cluster or a managed job: asked for, listed, and given back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.sky import command as sky_command
from stackrl.runtime.launch.sky.command import NoAnswer
from stackrl.runtime.run import RunFolder

CLUSTER, JOB = "cluster", "job"
"""What SkyPilot makes of a launch; a job may be a group of jobs."""
WAITING = frozenset({"PENDING", "SUBMITTED", "STARTING", "RECOVERING"})
WORKING = frozenset({"RUNNING", "WINDING_DOWN", "CANCELLING"})
DONE, UNMINDED = "SUCCEEDED", "FAILED_CONTROLLER"
"""Ends of a managed job: a good one, and one after which SkyPilot does not know of its machines."""
SUBMITTING = "submitting"
"""In a handle's details from before SkyPilot is asked for machines until its client has ended: what was only
just asked for is not listed yet, and SkyPilot goes on with it although its client is interrupted."""
COMING_SECONDS = 3600.0
"""For how long what was asked for may come without being listed."""
COME_LIMIT = 120.0
"""Seconds of waiting for it, to give it back."""
GONE_LIMITS = {CLUSTER: 30.0, JOB: 300.0}
"""Seconds from `sky down`, which waits itself, or `sky jobs cancel`, which does not, until it is gone."""
POLL_SECONDS = 2.0
NOT_LISTED = "SkyPilot was asked for it, and does not list it yet"


def is_job(handle: Handle) -> bool:
    return handle.details.get("kind") == JOB


def records_of(handle: Handle) -> list[dict[str, Any]]:
    """What SkyPilot knows of a managed job, task by task. Raises NoAnswer."""
    question = ["jobs", "queue", "--all"]
    try:
        queue = sky_command.ask(question)
    except NoAnswer:
        if may_come(handle):  # SkyPilot is starting its controller for it
            raise
        # a controller that has nothing to do stops itself, and answers only when it is started again
        queue = sky_command.ask([*question, "--refresh"], sky_command.RESTART_LIMIT)
    return [record for record in queue if record.get("job_name") == handle.job]


def cluster_of(handle: Handle) -> dict[str, Any] | None:
    """What SkyPilot knows of a cluster, having asked its cloud; None where there is none. Raises NoAnswer."""
    clusters = sky_command.ask(["status", "--refresh"])
    return next((cluster for cluster in clusters if cluster.get("name") == handle.job), None)


def _is_there(handle: Handle) -> bool:
    """Whether SkyPilot has, or is about to have, machines for it. Raises NoAnswer, also where SkyPilot itself
    does not know."""
    if not is_job(handle):
        return cluster_of(handle) is not None
    states = {record["status"] for record in records_of(handle)}
    if states & (WAITING | WORKING):
        return True
    if UNMINDED in states:
        raise NoAnswer(f"{UNMINDED}: SkyPilot minds it no more, and its machines may run on; see your cloud")
    return False


def _comes_to(handle: Handle, there: bool, limit: float) -> bool:
    """Ask until it is ``there``, or is not; False where it has not come to that after ``limit`` seconds.

    Raises NoAnswer where there is none at the end.
    """
    deadline = time.monotonic() + limit
    while True:
        wrong = None
        try:
            if _is_there(handle) is there:
                return True
        except NoAnswer as error:
            wrong = error
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    if wrong is not None:
        raise wrong
    return False


def appears(handle: Handle) -> bool:
    """Whether it is there, having waited where it may be coming. Raises NoAnswer."""
    return _comes_to(handle, True, COME_LIMIT if may_come(handle) else 0.0)


def may_come(handle: Handle) -> bool:
    """Whether SkyPilot may be at work on it without listing it."""
    return SUBMITTING in handle.details and time.time() - handle.submitted < COMING_SECONDS


def give_back(run: RunFolder, handle: Handle) -> None:
    """Raises NoAnswer where SkyPilot does not end it: `sky` ends with 0 also where it could not."""
    kind = JOB if is_job(handle) else CLUSTER
    verb = ["jobs", "cancel", "-n"] if kind == JOB else ["down"]
    said = sky_command.do([*verb, handle.job, "-y"], sky_command.END_LIMIT)
    if not _comes_to(handle, False, GONE_LIMITS[kind]):
        words = f"it is still there {GONE_LIMITS[kind]:.0f} s after `sky {' '.join(verb)} {handle.job}`"
        raise NoAnswer(f"{words}, which said: {sky_command.last_words(said) or 'nothing'}")
    if SUBMITTING in handle.details:
        note_submitted(run)


def unreached(handle: Handle, error: NoAnswer) -> str:
    return f"{_named(handle)}: {error}"


def coming(handle: Handle) -> str:
    return f"{_named(handle)}, which was asked for and is not listed yet: it may still come"


def _named(handle: Handle) -> str:
    return f"SkyPilot's {handle.details.get('kind', CLUSTER)} {handle.job}"


def note_submitted(run: RunFolder) -> None:
    """From now on SkyPilot lists all that it will have for the run."""
    handle = Handle.of(run)
    details = {key: value for key, value in handle.details.items() if key != SUBMITTING}
    replace(handle, details=details).write(run)
