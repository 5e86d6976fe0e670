"""Which run a node program works on, and what it refuses to work on."""

from __future__ import annotations

import math
import os
import time

from stackrl.runtime.launch import money
from stackrl.runtime.launch.admit import Planner, admit
from stackrl.runtime.launch.again import go_on, recreate
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.place import ADDRESSES_VARIABLE, Place, job_run_id
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder, create_run, runs_home
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.split import is_mixed


def refuse_place(place: Place, loaded: LoadedStack | None, run: RunFolder | None) -> None:
    """Raises RunError where these nodes cannot work on ``loaded``, or on ``run``, together."""
    if run is not None and (planned := _nodes_of(run)) != place.nodes:
        raise RunError(
            f"run {run.id} is planned for {planned} node(s), but works on {place.nodes} here; "
            f"start it where `stackrl launch --resume {run.id}` does"
        )
    if loaded is not None and is_mixed(loaded.stack) and not os.environ.get(ADDRESSES_VARIABLE):
        raise RunError(
            f"roles of {loaded.path} have machines of their own kind, which plain `sky launch` cannot get; "
            f"type `stackrl launch {loaded.path} --infra k8s`, or `--infra slurm`"
        )
    if loaded is not None and (wanted := loaded.task.get("num_nodes") or 1) != place.nodes:
        raise RunError(
            f"{loaded.path} says `num_nodes: {wanted}`, but this task runs on {place.nodes} node(s); "
            "start it as it is written, without `--num-nodes`"
        )
    if place.nodes > 1 and not os.environ.get(TOKEN_VARIABLE):
        raise RunError(
            f"{place.nodes} nodes need the same {TOKEN_VARIABLE} to trust each other; "
            f"`export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`, then launch with `--secret {TOKEN_VARIABLE}`"
        )


def _nodes_of(run: RunFolder) -> int:
    return 1 + max((process.get("node", 0) for process in run.read("plan.json")["processes"]), default=0)


def run_of(loaded: LoadedStack, place: Place, planner: Planner) -> RunFolder:
    """The run of a stack file: a new one, or that of the managed job which starts this node again."""
    alone = place.nodes == 1  # what several nodes have is compared when they meet
    run_id = job_run_id(loaded.name, os.environ)
    if run_id is not None:
        run = RunFolder(runs_home() / run_id)
        if (run.path / "state.json").exists():
            return run if run.state().status == "finished" else go_on(run, loaded, planner, here=alone)
        if (found := recreate(run_id, loaded, planner, here=alone)) is not None:
            return found
    stack, plan = admit(loaded, planner, here=alone)
    run = create_run(loaded.name, loaded.path, loaded.hash, stack, plan, run_id=run_id)
    Handle("local", submitted=time.time(), hourly=money.hourly_on_node(run, os.environ)).write(run)
    return run


def refuse_spent(run: RunFolder) -> None:
    limits, used = run.stack().limits, run.state().used
    hours = limits.hours
    if hours is not None and used >= hours * 3600:
        raise RunError(
            f"run {run.id} has worked {used / 3600:.1f} h of its {hours:g} (limits.hours); to give it more: "
            f"`stackrl launch FILE --resume {run.id} --set limits.hours={math.ceil(2 * hours)}`"
        )
    money.refuse_spent(run, limits, os.environ)


def is_done(run: RunFolder) -> bool:
    """Whether a finished run's job was only started once more. Raises RunError for other finished runs."""
    if run.state().status != "finished":
        return False
    if job_run_id(run.read("run.json")["name"], os.environ) == run.id:
        return True
    raise RunError(f"run {run.id} is finished; its model is in {run.final}")
