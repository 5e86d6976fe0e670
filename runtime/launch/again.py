"""Go on with a run: from its folder, or, where that is lost with its machine, from its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.launch import scaling
from stackrl.runtime.launch.admit import Planner, admit
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.launch.resume import refuse_against_checkpoint, refuse_changes
from stackrl.runtime.run import RunError, RunFolder, State, create_run
from stackrl.schemas.loader import LoadedStack


def go_on(
    run: RunFolder,
    source: LoadedStack,
    planner: Planner = make_plan,
    environment: Mapping[str, str] | None = None,
    *,
    here: bool = True,
) -> RunFolder:
    """Let ``run`` go on with ``source``, on this machine or, not ``here``, on machines of a backend.

    Raises StackError where it cannot, and RunError where it is running.
    """
    refuse_running(run)
    stack, plan = admit(source, planner, here=here)
    refuse_changes(run, source, stack)
    run.write_source(source.path, source.hash, environment or {})
    run.write_plan(stack, plan)
    scaling.keep(run)
    return run


def recreate(
    run_id: str,
    source: LoadedStack,
    planner: Planner = make_plan,
    environment: Mapping[str, str] | None = None,
    *,
    here: bool = True,
) -> RunFolder | None:
    """Make the folder of a run anew whose checkpoints are in ``source``'s `checkpoint.path`; None where there
    is none that can be used.

    Its incarnations, and the time that it has used of `limits.hours`, go on from the highest that any
    checkpoint knows; metrics and events are those of the
    newest good one, and its journal is restored when the roles start. Raises StackError where ``source`` does
    not fit that one.
    """
    stack, plan = admit(source, planner, here=here)
    if not stack.checkpoint.path:
        return None
    saved = Path(stack.checkpoint.path) / run_id
    if (newest := checkpoints.newest(saved)) is None:
        return None
    refuse_against_checkpoint(newest, source, stack)
    run = create_run(source.name, source.path, source.hash, stack, plan, environment, run_id=run_id)
    for file in (run.metrics, run.events):
        if (copy := newest / checkpoints.BOOKS / file.name).exists():
            shutil.copyfile(copy, file)
            file.chmod(0o600)
    incarnation, used = int(_highest(saved, "incarnation")), _highest(saved, "used")
    run.write_state(State(incarnation=incarnation, used=used))
    return run


def refuse_running(run: RunFolder) -> None:
    if run.keeper() is not None:
        raise RunError(f"run {run.id} is running; end it first with `stackrl down {run.id}`")


def environment_of(source: LoadedStack) -> dict[str, str]:
    """The task's `envs`, which SkyPilot would bring; null takes what this process has."""
    envs = source.task.get("envs") or {}
    return {name: str(value) for name, value in envs.items() if value is not None}


def _highest(saved: Path, fact: str) -> float:
    """What the manifests say of ``fact``, also those of damaged checkpoints: it was lived."""
    found = [0.0]
    for manifest in saved.glob(f"*/{checkpoints.MANIFEST}"):
        try:
            found.append(float(json.loads(manifest.read_bytes())[fact]))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return max(found)
