"""The verbs for runs that exist: `status`, `logs`, `watch`, `exec`, `down`; and how a run's end is told."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stackrl.runtime.launch import backends
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.listing import (
    ENDS,
    Standing,
    describe,
    describe_all,
    money_of,
    standing_of,
    status_of,
    table,
)
from stackrl.runtime.monitor.lines import Prefixed, duration, is_noise, printable
from stackrl.runtime.run import RunError, RunFolder, all_runs, find_run, runs_home

_POLL_SECONDS = 0.3
_ASK_SECONDS = 5.0
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
    described = describe_all(all_runs())
    if output == "json":
        print(json.dumps(described, indent=1))
    elif described:
        print(table(described))
    else:
        print(f"no runs in {runs_home()} yet; start one with `stackrl launch STACK`", file=sys.stderr)
    return 0


def logs(run: str, role: str | None, follow: bool, attempt: int | None, lines: int) -> int:
    """Print the last ``lines`` of each process's log (or of ``role``, such as `trainer-0` or `trainer`).

    Where the logs are on machines of a backend, it prints them its own way.
    """
    found, handle = find_run(run), Handle.of(find_run(run))
    if (code := backends.backend(handle.backend).logs(found, handle, follow=follow)) is not None:
        return code
    folder = found.logs(attempt if attempt is not None else found.state().attempt)
    if not (files := _log_files(folder, role)):
        raise RunError(_no_logs(found, folder, role))
    show = Prefixed(sys.stdout, [file.stem for file in files])
    places: dict[Path, int] = {}
    goes_on = _asked_now_and_then(found, handle)
    for file in files:
        with open(file, "rb") as log:
            for line in deque(log, maxlen=lines):
                show(file.stem, line.decode(errors="replace").rstrip("\n"))
            places[file] = log.tell()
    while follow:
        alive = goes_on()  # asked before reading, so that the last lines are not missed
        for file in _log_files(folder, role):
            places[file] = _show_new(file, places.get(file, 0), show)
        if not alive:
            return 0
        time.sleep(_POLL_SECONDS)
    return 0


def down(run: str) -> int:
    """End a run and everything it started, and give its machines back. 0 also where there is nothing to end,
    1 where something could not be reached."""
    found = find_run(run)
    handle = Handle.of(found)
    if handle.backend == backends.LOCAL and found.keeper() is None:
        print(f"run {found.id} is not running ({status_of(found)})", file=sys.stderr)
        return 0
    print(
        f"ending run {found.id}, which saves first what it has learnt; `stackrl down` again ends it at once",
        file=sys.stderr,
    )
    if unreached := backends.backend(handle.backend).down(found, handle):
        for words in unreached:
            print(f"not reached: {words}", file=sys.stderr)
        return 1
    if handle.backend != backends.LOCAL:
        _note_end(found)
    print(explain(found), file=sys.stderr)
    return 0


def _note_end(run: RunFolder) -> None:
    """Note that a run's machines are gone, and with them whoever could have written its end."""
    Handle.of(run).end(run)
    if (state := run.state()).status not in ENDS:
        roles = {name: "ended" if how == "running" else how for name, how in state.roles.items()}
        reason = "stopped by `stackrl down`"
        run.write_state(replace(state, status="stopped", reason=reason, ended=time.time(), roles=roles))


def execute(run: str, command: Sequence[str], node: int) -> int:
    """Run a command on a node of a run; its exit code."""
    found = find_run(run)
    handle = Handle.of(found)
    return backends.backend(handle.backend).execute(found, handle, command, node)


def watch(run: str) -> int:
    """Show a run until its end, which is 0 where it finished well. Ctrl-C leaves it alone, which is 0 too."""
    from rich.console import Console

    from stackrl.runtime.monitor.view import follow

    found = find_run(run)
    try:
        follow(found, _asked_now_and_then(found, Handle.of(found)), Console())
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


def _asked_now_and_then(run: RunFolder, handle: Handle) -> Callable[[], bool]:
    """Whether somebody works on ``run``. Another machine is asked every few seconds only."""
    if handle.backend == backends.LOCAL:
        return lambda: run.keeper() is not None
    asked, answer = -math.inf, True

    def goes_on() -> bool:
        nonlocal asked, answer
        if time.monotonic() - asked > _ASK_SECONDS:
            answer, asked = backends.look(run).phase in ("waiting", "running"), time.monotonic()
        return answer and run.state().status != "finished"

    return goes_on


def explain(run: RunFolder, standing: Standing | None = None) -> str:
    """How a run ended and what to type next, for people."""
    standing = standing or standing_of(run)
    state, status = run.state(), standing.status
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
    words = f" ({printable(standing.seen.words)})" if standing.seen and standing.seen.words else ""
    if status == "ended":
        return f"run {run.id} has ended{words}; its logs: `stackrl logs {run.id}`; {resume}"
    if status == "unreachable":
        return f"run {run.id} cannot be reached{words}; try again, or end it with `stackrl down {run.id}`"
    if status == "waiting":
        return f"run {run.id} is waiting for machines{words}; give up with `stackrl down {run.id}`"
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


def _details(run: RunFolder) -> str:
    standing = standing_of(run, ask=True)
    described = describe(run, standing)
    machines = described["machines"]
    facts = [
        ("folder", str(run.path)),
        ("attempt", f"{described['attempt']}, incarnation {described['incarnation']} of the trainer"),
        ("machines", printable(f"{machines['phase']}: {machines['words']}") if machines else ""),
        ("cost", money_of(described)),
        *((name, _doing(how, described["doing"].get(name))) for name, how in described["roles"].items()),
    ]
    facts = [(name, fact) for name, fact in facts if fact]
    width = max(len(name) for name, _ in facts)
    lines = (f"{name:<{width}}  {fact}" for name, fact in facts)
    return "\n".join([table([described]), "", *lines, "", explain(run, standing)])


def _doing(how: str, said: dict[str, Any] | None) -> str:
    if how != "running" or said is None:
        return how
    return f"{how}: {printable(said['text'])} (for {duration(time.time() - said['since'])})"


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
