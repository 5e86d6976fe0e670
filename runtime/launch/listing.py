"""What `status` says of runs, whoever carries them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackrl.runtime.launch import backends, money
from stackrl.runtime.launch.handle import Handle, Seen
from stackrl.runtime.monitor.doings import read_doings
from stackrl.runtime.monitor.lines import duration
from stackrl.runtime.run import RunError, RunFolder

_ASKED_AT_ONCE = 8
"""Runs whose backends are asked at the same time: a cloud takes seconds to answer."""
ENDS = ("finished", "failed", "stopped")
"""Statuses of a state that a node program, or `down`, writes last."""


@dataclass(frozen=True)
class Standing:
    """What a run is doing, by its own books and by what its backend says."""

    status: str
    """The state's; or waiting (for machines), died, ended (nothing more is known), unreachable."""
    seen: Seen | None = None
    """None where the backend was not asked, for the run's state tells its end."""

    @property
    def goes_on(self) -> bool:
        return self.status in ("starting", "running")


def standing_of(run: RunFolder, *, ask: bool = False) -> Standing:
    """``ask``: ask the backend also of a run that has ended, whose machines may still be there."""
    state, handle = run.state(), Handle.of(run)
    if handle.backend == backends.LOCAL:
        dead = state.status in ("starting", "running") and run.keeper() is None
        return Standing("died" if dead else state.status)
    if state.status in ENDS and not ask:
        return Standing(state.status)
    seen = backends.look(run, handle)
    return Standing(_status(run.state().status, seen), seen)


def status_of(run: RunFolder) -> str:
    """The state's status, but `died` where it goes on according to the state and nobody is there."""
    return standing_of(run).status


def _status(status: str, seen: Seen) -> str:
    if seen.phase == "waiting":  # also when its job was queued once more
        return "waiting"
    if status in ENDS:
        return status
    if seen.phase == "running":
        return "starting" if status == "created" else status
    if seen.phase == "unreachable":
        return "unreachable"
    return "ended" if status == "created" else "died"


def describe(run: RunFolder, standing: Standing | None = None) -> dict[str, Any]:
    """What `status -o json` says of a run."""
    about, standing = run.read("run.json"), standing or standing_of(run, ask=True)
    state, handle, seen = run.state(), Handle.of(run), standing.seen
    newest = _last_record(run.metrics) or {}
    return {
        "id": run.id,
        "name": about["name"],
        "status": standing.status,
        "stage": newest.get("stage"),
        "step": newest["index"] + 1 if newest else 0,
        "steps": sum(stage["steps"] for stage in run.read("stack.json")["stages"]),
        "reward": newest.get("reward"),
        "attempt": state.attempt,
        "incarnation": state.incarnation,
        "roles": state.roles,
        "doing": _doings(run) if standing.goes_on else {},
        "reason": state.reason,
        "made": about["made"],
        "age": time.time() - about["made"],
        "ended": state.ended,
        "backend": handle.backend,
        "job": handle.job,
        "machines": {"phase": seen.phase, "words": seen.words} if seen else None,
        "hourly": handle.hourly,
        "cost": money.cost_so_far(state, handle, time.time()),
        "path": str(run.path),
    }


def describe_all(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """`describe` of each, also of one whose files are damaged: the others are listed all the same."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(_described, runs))


def _described(run: RunFolder) -> dict[str, Any]:
    try:
        return describe(run)
    except (RunError, OSError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, RunError | OSError) else f"its files lack {error}"
        made = run.path.stat().st_mtime
        return {
            "id": run.id, "name": None, "status": "damaged", "stage": None, "step": 0, "steps": 0,
            "reward": None, "attempt": 0, "incarnation": 0, "roles": {}, "doing": {}, "reason": reason,
            "made": made, "age": time.time() - made, "ended": None, "backend": "", "job": "",
            "machines": None, "hourly": None, "cost": None, "path": str(run.path),
        }  # fmt: skip


def table(described: Sequence[dict[str, Any]]) -> str:
    """A row for each; a column of money where any of them costs some."""
    rows = [("RUN", "STATUS", "STAGE", "STEP", "REWARD", "AGE", "COST", "WHERE", "ROLES")]
    for run in described:
        reward = "" if run["reward"] is None else f"{run['reward']:.3f}"
        step = f"{run['step']}/{run['steps']}"
        age, roles = duration(run["age"]), _counted(run["roles"])
        cost = money.told(run["cost"], run["hourly"]) if run["backend"] else ""
        where = "here" if run["backend"] == backends.LOCAL else f"{run['backend']} {run['job']}".strip()
        rows.append((run["id"], run["status"], run["stage"] or "", step, reward, age, cost, where, roles))
    if not any(row[6] for row in rows[1:]):
        rows = [(*row[:6], *row[7:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _counted(roles: dict[str, str]) -> str:
    """`4 running`, and by name those that are being started again or have failed."""
    named = {name: how for name, how in roles.items() if how.startswith(("restarting", "failed"))}
    counts = Counter(how for name, how in roles.items() if name not in named)
    return ", ".join([*(f"{count} {how}" for how, count in counts.items()), *map(" ".join, named.items())])


def money_of(described: dict[str, Any]) -> str:
    """What a run's machines have cost, and cost per hour; empty where nobody asks for money."""
    cost, hourly = described["cost"], described["hourly"]
    if cost is None or hourly is None:
        return "unknown: no catalog has the price of its machines"
    return f"{money.told(cost, hourly)}, {money.dollars(hourly)} an hour" if hourly else ""


def _doings(run: RunFolder) -> dict[str, Any]:
    return {name: vars(doing) for name, doing in read_doings(run.heartbeats).items()}


def _last_record(file: Path, window: int = 1 << 16) -> dict[str, Any] | None:
    """The last line of a file of JSON lines that is whole, without reading the rest."""
    try:
        with open(file, "rb") as text:
            text.seek(max(0, os.fstat(text.fileno()).st_size - window))
            lines = text.read().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # a full disk or a kill has cut it short
            return json.loads(line)
    return None
