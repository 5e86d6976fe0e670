"""`stackrl scale`: ask the node program of a run for more or fewer engines, and tell what it answers.

The question is the file scale.json in the run's folder, and so is the answer (runtime/scaling.py).
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence

from stackrl.runtime.launch import backends
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.planning import scaled
from stackrl.runtime.launch.planning.plan import Process
from stackrl.runtime.run import RunError, RunFolder, find_run

QUESTION = "scale.json"
KEPT = "scaled.json"
ANSWER_LIMIT = 60.0
"""Seconds. The node program looks once a second, but for when it ends or starts processes."""
_POLL_SECONDS = 0.1


def scale(name: str, wanted: Sequence[str]) -> int:
    """Bring pools of the run called ``name`` to the counts ``wanted``, such as `decode=4`. 0: it is done.

    Raises RunError where it cannot be done.
    """
    counts, run = read_counts(wanted), find_run(name)
    if run.keeper() is None:
        handle = Handle.of(run)
        if handle.backend != backends.LOCAL and backends.at_work(run):
            command = ["stackrl", "scale", run.id, *wanted]
            return backends.backend(handle.backend).execute(run, handle, command, 0)
        pool, count = next(iter(counts.items()))
        raise RunError(
            f"run {run.id} is not running; to go on with another count, change the stack's `roles.{pool}`: "
            f"`stackrl launch FILE --resume {run.id} --set roles.{pool}.processes={count}`"
        )
    print(_asked(run, counts), file=sys.stderr)
    return 0


def read_counts(wanted: Sequence[str]) -> dict[str, int]:
    """Pool → how many engines. Raises RunError."""
    counts: dict[str, int] = {}
    for text in wanted:
        match = re.fullmatch(r"(inference|prefill|decode)=(\d{1,6})", text)
        if match is None:
            raise RunError(f"{text!r} is no count of engines: type inference=2, prefill=1 or decode=4")
        if int(match[2]) == 0:
            raise RunError(f"{text}: a pool keeps one engine at least; end the run with `stackrl down`")
        if match[1] in counts:
            raise RunError(f"{match[1]} is said twice")
        counts[match[1]] = int(match[2])
    return counts


def _asked(run: RunFolder, counts: Mapping[str, int]) -> str:
    """The node program's answer. Raises RunError where it refuses, or gives none."""
    question = secrets.token_hex(8)
    run.write(QUESTION, {"id": question, "pools": dict(counts)})
    deadline = time.monotonic() + ANSWER_LIMIT
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        told = run.read(QUESTION)
        if told.get("id") != question:
            raise RunError(f"another `stackrl scale` of run {run.id} came between; type it again")
        if "refused" in told:
            raise RunError(f"run {run.id} was not changed: {told['refused']}")
        if "answer" in told:
            return f"run {run.id}: {told['answer']}"
    (run.path / QUESTION).unlink(missing_ok=True)
    raise RunError(
        f"the node program of run {run.id} did not answer within {ANSWER_LIMIT:.0f} s; is it still "
        f"starting, or ending? `stackrl status {run.id}` tells"
    )


def keep(run: RunFolder) -> None:
    """Let the plan that was just made for ``run`` have the counts of engines that were asked for before, as
    far as its stack says nothing else."""
    if not (run.path / KEPT).exists():
        return
    plan, holds = scaled.kept(run.read("plan.json"), run.read(KEPT))
    run.write("plan.json", plan)
    run.write(KEPT, holds)
    for pool, numbers in holds.items():
        print(
            f"note: run {run.id} keeps {numbers['count']} {pool} engine(s), as `stackrl scale` asked for",
            file=sys.stderr,
        )


def note_kept(run: RunFolder, pool: str, planned: int, count: int) -> None:
    """What `keep` is to find. ``planned``: how many engines the stack plans, unless that is noted already."""
    kept = run.read(KEPT) if (run.path / KEPT).exists() else {}
    first = kept.get(pool, {}).get("planned", planned)
    run.write(KEPT, kept | {pool: {"planned": first, "count": count}})


def words_of(pool: str, before: int, joins: Sequence[Process], leaves: Sequence[Process]) -> str:
    """What changes, for people."""
    after = before + len(joins) - len(leaves)
    if before == after:
        return f"{pool} has {before} engine(s) already"
    names = ", ".join(process.name for process in [*joins, *leaves])
    does = (
        "starts and takes rollouts when it holds the run's weights"
        if joins
        else "leaves: its rollouts go on elsewhere"
    )
    return f"{pool} {before} → {after} engines; {names} {does}"
