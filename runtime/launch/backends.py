"""Ways to get machines for a run, by name and by the words of `--infra`.

A backend is a module of this folder that holds ``BACKEND``, an object with the methods of `handle.Backend`.
Each is loaded only when a run needs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from stackrl.runtime.launch.handle import Backend, Handle, Seen
from stackrl.runtime.run import RunError, RunFolder, find_run
from stackrl.schemas.problems import StackError

if TYPE_CHECKING:
    from stackrl.schemas.loader import LoadedStack
    from stackrl.schemas.split import Task

LOCAL, SLURM, SKY = "local", "slurm", "sky"
MODULES = {
    LOCAL: "stackrl.runtime.launch.local",
    SLURM: "stackrl.runtime.launch.slurm.backend",
    SKY: "stackrl.runtime.launch.sky.backend",
}
CLOUDS = (
    "aws", "azure", "cudo", "do", "fluidstack", "gcp", "hyperbolic", "ibm", "k8s", "kubernetes", "lambda",
    "mithril", "nebius", "oci", "paperspace", "primeintellect", "runpod", "scp", "seeweb", "shadeform", "ssh",
    "vast", "verda", "vsphere", "yotta",
)  # fmt: skip
"""First words of an `infra` that SkyPilot carries a run to; `sky` itself lets SkyPilot choose."""


def backend(name: str) -> Backend:
    """The backend called ``name``, as a handle holds it. Raises RunError for one of another version."""
    if name not in MODULES:
        raise RunError(f"this version of stackrl knows no backend {name!r}; it has {', '.join(MODULES)}")
    return import_module(MODULES[name]).BACKEND


def backend_of_infra(infra: str) -> str:
    """The backend that carries a run to ``infra``: `local`, `slurm[/CLUSTER[/PARTITION]]`, a cloud of
    SkyPilot's (`aws`, `aws/us-east-1`, `k8s/CONTEXT` …), or `sky`. Raises RunError."""
    first = infra.partition("/")[0].lower()
    if first in MODULES:
        return first
    if first in CLOUDS or first == "*":
        return SKY
    near = get_close_matches(first, [*MODULES, *CLOUDS], 1)
    hint = f"did you mean {near[0]}?" if near else f"it begins with {', '.join(MODULES)}, or a cloud: "
    raise RunError(f"--infra {infra}: there is no {first!r}; {hint}{'' if near else ', '.join(CLOUDS)}")


def launch(
    source: LoadedStack | None,
    infra: str | None,
    *,
    detach: bool,
    resume: str | None = None,
    origin: str | None = None,
    changes: Sequence[str] = (),
) -> int:
    """Start, resume or fork a run where ``infra`` says; the verb's exit code.

    Without ``infra`` a new run starts on this machine, and one that goes on where it was. The other
    arguments are those of `local.launch`. Raises StackError and RunError.
    """
    from stackrl.runtime.launch import local

    if infra is None and resume is not None:
        infra = _infra_of(resume)
    infra = LOCAL if infra is None else infra
    name = backend_of_infra(infra)
    if name == LOCAL:
        return local.launch(source, detach=detach, resume=resume, origin=origin, changes=changes)
    carrier = backend(name)
    if resume is not None:
        run = find_run(resume)
        refuse_at_work(run)
        if run.state().status == "finished":
            raise RunError(f"run {run.id} is finished; its model is in {run.final}")
        return carrier.resume(run, infra, source, detach=detach)
    if origin is not None:
        from stackrl.runtime.launch.fork import fork

        run = fork(origin, source, changes, here=False)
        try:
            return carrier.resume(run, infra, None, detach=detach)
        except (RunError, StackError):  # nothing was started
            shutil.rmtree(run.checkpoints(run.stack()), ignore_errors=True)
            shutil.rmtree(run.path, ignore_errors=True)
            raise
    if source is None:
        raise RunError(local.NOTHING)
    return carrier.launch(source, infra, detach=detach)


def look(run: RunFolder, handle: Handle | None = None) -> Seen:
    """What the backend of ``run`` says of its machines. Never raises for what is merely gone."""
    handle = handle or Handle.of(run)
    if handle.ended is not None:
        return Seen("ended", handle.details.get("end", ""))
    seen = backend(handle.backend).look(run, handle)
    if seen.phase == "ended" and handle.backend != LOCAL:
        now = Handle.of(run)  # the backend may have noted something, or somebody launched the run again
        if now.job == handle.job:
            now.end(run, seen.words)
    return seen


def at_work(run: RunFolder) -> bool:
    """Whether anybody works on ``run``, or is waiting for machines to do it, wherever that is."""
    return look(run).phase in ("waiting", "running")


def refuse_at_work(run: RunFolder) -> None:
    """Raises RunError where somebody works on ``run``, or is waiting for machines to do it."""
    seen = look(run)
    if seen.phase in ("waiting", "running"):
        raise RunError(f"run {run.id} is {seen.phase}; end it first with `stackrl down {run.id}`")
    if seen.phase == "unreachable":
        raise RunError(
            f"run {run.id} may be at work: {seen.words}; end it first with `stackrl down {run.id}`"
        )


def choices(path: object, task: Task) -> str:
    """What to type to start a stack elsewhere: the places that its `resources` name, else all kinds."""
    words = _infras(task) or [SLURM, SKY]
    return " or ".join(f"`stackrl launch {path} --infra {word}`" for word in words)


def _infras(task: Task) -> list[str]:
    """Every `infra` of the task's `resources`, in order."""
    resources = task.get("resources") or {}
    choices = [*(resources.get("any_of") or resources.get("ordered") or ()), resources]
    return list(dict.fromkeys(choice["infra"] for choice in choices if choice.get("infra")))


def _infra_of(name: str) -> str:
    """Where the run called ``name`` was; this machine where its folder is gone."""
    try:
        handle = Handle.of(find_run(name))
    except RunError:
        return LOCAL
    return handle.details.get("infra") or handle.backend
