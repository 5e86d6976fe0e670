"""The verbs for runs that exist: `status`, `logs`, `watch`, `down`; and what a run's end is told as."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from stackrl.runtime.monitor.doings import read_doings
from stackrl.runtime.monitor.lines import Prefixed, duration, is_noise, printable
from stackrl.runtime.processes import send
from stackrl.runtime.run import RunError, RunFolder, all_runs, find_run, runs_home
from stackrl.runtime.stopping import longest_end

_POLL_SECONDS = 0.3
_LAST_LINES = 12
_LOOKED_THROUGH = 400
"""Last lines of a log among which those that say something are looked for."""
_STACKS = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\)")
"""How Python begins to write the stacks of a process's threads."""


def status(run: str | None, output: str) -> int:
    """Print all runs, or one with its processes and the reason of its end."""
    if run is not None:
        found = find_run(run)
        print(json.dumps(describe(found), indent=1) if output == "json" else _details(found))
        return 0
    described = [_described(found) for found in all_runs()]
    if output == "json":
        print(json.dumps(described, indent=1))
    elif described:
        print(_table(described))
    else:
        print(f"no runs in {runs_home()} yet; start one with `stackrl launch STACK`", file=sys.stderr)
    return 0


def logs(run: str, role: str | None, follow: bool, attempt: int | None, lines: int) -> int:
    """Print the last ``lines`` of each process's log (or of ``role``, such as `trainer-0` or `trainer`)."""
    found = find_run(run)
    folder = found.logs(attempt if attempt is not None else found.state().attempt)
    if not (files := _log_files(folder, role)):
        raise RunError(_no_logs(found, folder, role))
    show = Prefixed(sys.stdout, [file.stem for file in files])
    places: dict[Path, int] = {}
    for file in files:
        with open(file, "rb") as log:
            for line in deque(log, maxlen=lines):
                show(file.stem, line.decode(errors="replace").rstrip("\n"))
            places[file] = log.tell()
    while follow:
        alive = found.keeper() is not None  # asked before reading, so that the last lines are not missed
        for file in _log_files(folder, role):
            places[file] = _show_new(file, places.get(file, 0), show)
        if not alive:
            return 0
        time.sleep(_POLL_SECONDS)
    return 0


def down(run: str) -> int:
    """End a run and everything it started. Fine where it is not running."""
    found = find_run(run)
    if (pid := found.keeper()) is None:
        print(f"run {found.id} is not running ({status_of(found)})", file=sys.stderr)
        return 0
    print(
        f"ending run {found.id}, which saves first what it has learnt; `stackrl down` again ends it at once",
        file=sys.stderr,
    )
    send(pid, signal.SIGTERM)
    limit = longest_end(found) + 30
    if not wait_until_ended(found, limit):
        raise RunError(f"run {found.id} did not end within {limit:.0f} s; its node program is process {pid}")
    print(explain(found), file=sys.stderr)
    return 0


def watch(run: str) -> int:
    """Show a run until its end, which is 0 where it finished well. Ctrl-C leaves it alone, which is 0 too."""
    from rich.console import Console

    from stackrl.runtime.monitor.view import follow

    found = find_run(run)
    try:
        follow(found, lambda: found.keeper() is not None, Console())
    except KeyboardInterrupt:
        print(f"\nno longer watching; {explain(found)}", file=sys.stderr)
        return 0
    print(explain(found), file=sys.stderr)
    return 0 if found.state().status == "finished" else 1


def wait_until_ended(run: RunFolder, limit: float) -> bool:
    """Wait until no node program works on the run; False where one still does after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while run.keeper() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def status_of(run: RunFolder) -> str:
    """The state's status, but `died` where it goes on according to the state and nobody is there."""
    state = run.state()
    return "died" if state.status in ("starting", "running") and run.keeper() is None else state.status


def describe(run: RunFolder) -> dict[str, Any]:
    """What `status -o json` says of a run."""
    about, state = run.read("run.json"), run.state()
    goes_on = status_of(run) in ("starting", "running")
    newest = _last_record(run.metrics) or {}
    return {
        "id": run.id,
        "name": about["name"],
        "status": status_of(run),
        "stage": newest.get("stage"),
        "step": newest["index"] + 1 if newest else 0,
        "steps": sum(stage["steps"] for stage in run.read("stack.json")["stages"]),
        "reward": newest.get("reward"),
        "attempt": state.attempt,
        "incarnation": state.incarnation,
        "roles": state.roles,
        "doing": {name: vars(doing) for name, doing in read_doings(run.heartbeats).items()}
        if goes_on
        else {},
        "reason": state.reason,
        "made": about["made"],
        "age": time.time() - about["made"],
        "ended": state.ended,
        "path": str(run.path),
    }


def _described(run: RunFolder) -> dict[str, Any]:
    """`describe`, also of a run whose files are damaged: the other runs are listed all the same."""
    try:
        return describe(run)
    except (RunError, OSError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, RunError | OSError) else f"its files lack {error}"
        made = run.path.stat().st_mtime
        return {
            "id": run.id, "name": None, "status": "damaged", "stage": None, "step": 0, "steps": 0,
            "reward": None, "attempt": 0, "incarnation": 0, "roles": {}, "doing": {}, "reason": reason,
            "made": made, "age": time.time() - made, "ended": None, "path": str(run.path),
        }  # fmt: skip


def explain(run: RunFolder) -> str:
    """How a run ended and what to type next, for people."""
    state, status = run.state(), status_of(run)
    resume = f"go on with `stackrl launch --resume {run.id}`"
    if status == "finished":
        took = duration((state.ended or 0) - state.began)
        return f"run {run.id} finished in {took}; its model is in {run.final}"
    if status == "failed":
        text = f"run {run.id} failed: {state.reason}\n"
        for role in (name for name, how in state.roles.items() if how == "failed"):
            log = run.logs(state.attempt) / f"{role}.log"
            text += f"  the last lines of {log}:\n"
            text += "".join(f"    {line}\n" for line in last_lines(log, _LAST_LINES))
            if (dump := stack_dump(log)) is not None:
                text += f"  the stacks of its threads: {log}:{dump}\n"
        return f"{text}  read all with `stackrl logs {run.id}`; {resume}"
    if status == "died":
        return f"run {run.id} died: its node program is gone; {resume}"
    if status == "stopped":
        how = state.reason if state.reason.startswith("stopped") else f"stopped: {state.reason}"
        if state.reason.startswith("guard "):
            resume = f"go on with other settings: `stackrl launch --from {run.id}@latest --set KEY=VALUE`"
        return f"run {run.id} was {how}; {resume}"
    watch = f"watch it with `stackrl watch {run.id}`, end it with `stackrl down {run.id}`"
    return f"run {run.id} is {status}; {watch}"


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a log that say something, without its stack dumps; none where it is not there."""
    try:
        with open(file, errors="replace") as text:
            lines = [line for line in deque(text, maxlen=_LOOKED_THROUGH) if not is_noise(line)]
    except FileNotFoundError:
        return []
    told: list[str] = []
    in_stacks = False
    for line in lines:
        in_stacks = _STACKS.match(line) is not None or (in_stacks and line.startswith("  File "))
        if not in_stacks:
            told.append(printable(line))
    return told[-count:]


def stack_dump(file: Path) -> int | None:
    """The number of the line in a log where its last stack dump begins; None where there is none."""
    found, in_stacks = None, False
    try:
        with open(file, errors="replace") as text:
            for number, line in enumerate(text, 1):
                begins = _STACKS.match(line) is not None
                if begins and not in_stacks:
                    found = number
                in_stacks = begins or (in_stacks and (line.startswith("  File ") or not line.strip()))
    except FileNotFoundError:
        return None
    return found


def _table(described: list[dict[str, Any]]) -> str:
    rows = [("RUN", "STATUS", "STAGE", "STEP", "REWARD", "AGE", "ROLES")]
    for run in described:
        reward = "" if run["reward"] is None else f"{run['reward']:.3f}"
        step = f"{run['step']}/{run['steps']}"
        age, roles = duration(run["age"]), _counted(run["roles"])
        rows.append((run["id"], run["status"], run["stage"] or "", step, reward, age, roles))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _counted(roles: dict[str, str]) -> str:
    """`4 running`, and by name those that are being started again or have failed."""
    named = {name: how for name, how in roles.items() if how.startswith(("restarting", "failed"))}
    counts = Counter(how for name, how in roles.items() if name not in named)
    return ", ".join([*(f"{count} {how}" for how, count in counts.items()), *map(" ".join, named.items())])


def _details(run: RunFolder) -> str:
    described = describe(run)
    facts = [
        ("folder", str(run.path)),
        ("attempt", f"{described['attempt']}, incarnation {described['incarnation']} of the trainer"),
        *((name, _doing(how, described["doing"].get(name))) for name, how in described["roles"].items()),
    ]
    width = max(len(name) for name, _ in facts)
    lines = (f"{name:<{width}}  {fact}" for name, fact in facts)
    return "\n".join([_table([described]), "", *lines, "", explain(run)])


def _doing(how: str, said: dict[str, Any] | None) -> str:
    if how != "running" or said is None:
        return how
    return f"{how}: {printable(said['text'])} (for {duration(time.time() - said['since'])})"


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


def _log_files(folder: Path, role: str | None) -> list[Path]:
    return sorted(
        file
        for file in folder.glob("*.log")
        if role is None or role in (file.stem, file.stem.rpartition("-")[0])
    )


def _no_logs(run: RunFolder, folder: Path, role: str | None) -> str:
    names = ", ".join(file.stem for file in _log_files(folder, None))
    if role is not None and names:
        return f"no process {role!r} in attempt {folder.name} of run {run.id}; there are {names}"
    attempts = ", ".join(sorted(path.name for path in folder.parent.glob("*") if path.is_dir())) or "none"
    return f"run {run.id} has no logs of attempt {folder.name}; attempts with logs: {attempts}"


def _show_new(file: Path, place: int, show: Prefixed) -> int:
    """Show the whole lines behind ``place``; the new place."""
    with open(file, "rb") as log:
        log.seek(place)
        whole, newline, _ = log.read().rpartition(b"\n")
    for line in whole.splitlines():
        show(file.stem, line.decode(errors="replace"))
    return place + len(whole) + len(newline)
