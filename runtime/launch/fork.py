"""A new run that begins where a checkpoint of another one stands: `stackrl launch [FILE] --from RUN@STEP`.

Kept: weights, optimizer and random state, the step counters, the place in the stages, the books and the
metrics up to the checkpoint. Left behind: rollouts that no step had trained, for they were made under the
other run's settings, and what is no part of a checkpoint (logs, the rollouts of the report).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.again import environment_of
from stackrl.runtime.launch.epochs import as_asked
from stackrl.runtime.launch.resume import MODEL, begun_stages, fixed
from stackrl.runtime.monitor.records import Tail
from stackrl.runtime.orchestrator import rollback
from stackrl.runtime.run import RunError, RunFolder, State, create_run, find_run, write_durably
from stackrl.schemas.loader import LoadedStack, load_text
from stackrl.schemas.problems import STACK, Problem, StackError
from stackrl.schemas.rules import at
from stackrl.schemas.stack import Stack
from stackrl.schemas.written import written

JOURNAL, STACK_FILE = f"{checkpoints.BOOKS}/journal.sqlite", f"{checkpoints.BOOKS}/stack.json"
"""Files of a checkpoint that are the fork's own."""
FORKED = "forked: it was not trained yet when the run was forked"
"""Why the books drop a rollout of the parent's."""


def fork(
    origin: str, source: LoadedStack | None, changes: Sequence[str] = (), *, here: bool = True
) -> RunFolder:
    """Make a run that goes on from ``origin``, RUN@STEP or RUN@latest, with ``source``, or, without one, with
    that run's own stack and ``changes`` (as `--set` has them). ``here``: whether it works on this machine.

    Raises StackError where a checkpoint of the run does not fit the stack, and RunError where there is no
    such run or checkpoint.
    """
    parent, checkpoint = find_checkpoint(origin)
    loaded = source or own_stack(parent, changes)
    stack, plan = admit(loaded, here=here)
    _refuse_changes(parent, checkpoint, loaded, stack)
    about = parent.read("run.json")
    if source is not None:
        run = create_run(source.name, source.path, source.hash, stack, plan, environment_of(source))
    else:
        file = parent.path / "source.yaml"
        run = create_run(about["name"], file, about["hash"], stack, plan, about["environment"])
        run.write("run.json", run.read("run.json") | {"source": about["source"]})
    try:
        _take_over(run, stack, parent, checkpoint)
    except BaseException:
        shutil.rmtree(run.checkpoints(stack), ignore_errors=True)
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def find_checkpoint(origin: str, verb: str = "--from") -> tuple[RunFolder, Path]:
    """The run and the checkpoint that RUN@STEP names; without a step, or with `latest`, its newest whole one.

    Raises RunError with the steps that there are, to be typed after ``verb``.
    """
    name, _, step = origin.partition("@")
    run = find_run(name)
    folder = run.checkpoints(run.stack())
    there = _steps(folder)
    if not there:
        every = run.stack().checkpoint.every
        raise RunError(f"run {run.id} has no checkpoint; it is saved every {every} steps and at its end")
    known = f"there are {', '.join(map(str, there))}: `{verb} {run.id}@{there[-1]}`"
    if step in ("", "latest"):
        if (newest := checkpoints.newest(folder)) is None:
            raise RunError(f"no checkpoint of run {run.id} can be used; see the warnings above")
        return run, newest
    if not step.isdecimal():
        raise RunError(f"{step!r} is not a step of run {run.id}; {known}, or `{verb} {run.id}@latest`")
    if int(step) not in there:
        raise RunError(f"run {run.id} has no checkpoint of step {int(step)}; {known}")
    checkpoint = checkpoints.folder(folder, int(step))
    try:
        checkpoints.verify(checkpoint)
    except checkpoints.CheckpointError as error:
        raise RunError(f"{error}; {known}") from None
    return run, checkpoint


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints that were finished, oldest first."""
    manifests = folder.glob(f"step-*/{checkpoints.MANIFEST}") if folder.is_dir() else ()
    names = (manifest.parent.name.removeprefix("step-") for manifest in manifests)
    return sorted(int(name) for name in names if name.isdecimal())


def own_stack(parent: RunFolder, changes: Sequence[str]) -> LoadedStack:
    """The stack that ``parent`` has, its own overrides included, with ``changes``."""
    about, task = parent.read("run.json"), yaml.safe_load((parent.path / "source.yaml").read_text())
    task = {**task, STACK[0]: {**task[STACK[0]], STACK[1]: written(as_asked(parent.stack()))}}
    text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
    return load_text(text, _as_named(task, Path(about["source"])), f"the stack of run {parent.id}", changes)


def _as_named(task: dict[str, Any], file: Path) -> Path:
    """The file where the task says that it is, seen from here: it may have been moved or deleted since."""
    workdir, named = task.get("workdir"), (task.get("envs") or {}).get("STACK", file.name)
    return Path(workdir if isinstance(workdir, str) else ".").expanduser() / str(named).lstrip("/")


def _refuse_changes(parent: RunFolder, checkpoint: Path, loaded: LoadedStack, stack: Stack) -> None:
    done = checkpoints.index_of(checkpoint)
    before = parent.stack()
    mend = f"put it back, or start without `--from {parent.id}@{done}`"
    problems = [*fixed(before, stack, (MODEL,), mend)]
    problems += begun_stages(before, stack, done, mend, next_too=False)
    if not problems and done >= sum(stage.steps for stage in stack.stages):
        last = stack.stages[-1]
        what = f"the checkpoint is at step {done}, where the stages end"
        mend = f"add a stage, or steps: `--set stages.{last.name}.steps={last.steps + 10}`"
        problems.append(Problem(at("stages"), what, mend))
    if problems:
        raise StackError(loaded.locate(problems))


def _take_over(run: RunFolder, stack: Stack, parent: RunFolder, checkpoint: Path) -> None:
    """Give ``run`` the checkpoint and what came before it. The manifest comes last, as always."""
    index = checkpoints.index_of(checkpoint)
    copy = checkpoints.folder(run.checkpoints(stack), index)
    try:
        manifest = checkpoints.verify(checkpoint, contents=False)
        for name in manifest["files"]:
            _link(checkpoint / name, copy / name, always_copy=name.startswith(f"{checkpoints.BOOKS}/"))
    except (FileNotFoundError, checkpoints.CheckpointError) as error:
        raise RunError(
            f"run {parent.id}, which keeps its newest checkpoints only, has deleted this one meanwhile "
            f"({error}); try again with `--from {parent.id}@latest`"
        ) from None
    _drop_untrained(copy / JOURNAL)
    shutil.copyfile(run.path / "stack.json", copy / STACK_FILE)
    manifest["files"] |= {name: _entry(copy / name) for name in (JOURNAL, STACK_FILE)}
    checkpoints.store_manifest(copy, manifest | {"used": 0.0})
    if parent.model.is_dir():
        for file in sorted(path for path in parent.model.rglob("*") if path.is_file()):
            _link(file, run.model / file.relative_to(parent.model))
    _write_history(run, parent, copy, index)
    run.write("run.json", run.read("run.json") | {"parent": {"run": parent.id, "step": index}})
    run.write_state(State(incarnation=max(parent.state().incarnation, manifest["incarnation"])))


def _link(file: Path, target: Path, *, always_copy: bool = False) -> None:
    """The same file at ``target``: a second name for it, or a copy where the disk is another one."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not always_copy:
        try:
            os.link(file, target)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES):
                raise
    shutil.copyfile(file, target)
    os.chmod(target, 0o600)
    with open(target, "rb") as copied:
        os.fsync(copied.fileno())


def _drop_untrained(journal: Path) -> None:
    """Rollouts that the parent had planned or finished for later batches: the settings may be others now."""
    with contextlib.closing(sqlite3.connect(journal)) as books, books:
        rollback.unseal(books)
        rollback.drop_open(books, rollback.stages_of(books), FORKED)


def _entry(file: Path) -> dict[str, Any]:
    """What a manifest says of ``file``, which is on disk when this returns."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _write_history(run: RunFolder, parent: RunFolder, checkpoint: Path, index: int) -> None:
    """The parent's metrics and events up to the checkpoint, and that here it was forked."""
    kept = checkpoint / checkpoints.BOOKS
    steps = _records(kept / parent.metrics.name, parent.metrics)
    events = _records(kept / parent.events.name, parent.events)
    forked = {"time": time.time(), "event": "forked", "from": parent.id, "index": index}
    _write_lines(run.metrics, (record for record in steps if record["index"] < index))
    _write_lines(run.events, [*_until_checkpoint(events, index), forked])


def _records(*files: Path) -> list[dict[str, Any]]:
    """The objects of the first of ``files`` that is there; torn lines are left out."""
    return next((Tail(file).read() for file in files if file.exists()), [])


def _until_checkpoint(events: Sequence[dict[str, Any]], index: int) -> Iterator[dict[str, Any]]:
    for event in events:
        yield event
        if event["event"] == "checkpoint" and event["index"] == index:
            return


def _write_lines(file: Path, records: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
    write_durably(file, "".join(f"{json.dumps(record)}\n" for record in records).encode())
