"""Ends a process with SIGKILL right before or right after a chosen call of a chosen function.

The faults of a run lie in ``crashes.json`` in its folder; each happens once, in whichever life of its process
first reaches it. ``python crashing.py ROLE RUN_DIR`` is a role with its faults: `orchestrator`, or `node`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from forked import Forked

from stackrl.runtime.orchestrator.rollback import replace as rollback_to

FILE = "crashes.json"
FAULT = "a fault on command"
KEEPS_JOURNAL = "STACKRL_TRIAL_KEEPS_JOURNAL"
"""Set for a run that is not to roll its journal back, which is a fault."""


@dataclass(frozen=True)
class Crash:
    """``process`` makes ``victim`` die when it calls ``function`` for the ``count``-th time in its life."""

    process: str
    function: str
    """module:qualified.name"""
    when: Literal["before", "after"]
    count: int
    victim: Literal["itself", "agent", "guard", "call"] = "itself"
    """`call`: nobody dies; the call raises an exception that nobody expects."""


def write(run: Path, crashes: list[Crash]) -> None:
    (run / FILE).write_text(json.dumps([asdict(crash) for crash in crashes]))


def happened(run: Path) -> list[int]:
    """Which of the run's crashes were reached."""
    return sorted(int(marker.suffix[1:]) for marker in run.glob(f"{FILE}.*"))


def install(run: Path, process: str) -> None:
    """Arm the crashes of ``process`` that have not happened yet."""
    for number, fields in enumerate(json.loads((run / FILE).read_text())):
        crash = Crash(**fields)
        if crash.process == process and number not in happened(run):
            _arm(crash, run / f"{FILE}.{number}")


def _arm(crash: Crash, marker: Path) -> None:
    module, _, path = crash.function.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, _deadly(getattr(owner, name), crash, marker))


def _deadly(function: Callable[..., Any], crash: Crash, marker: Path) -> Callable[..., Any]:
    calls = 0

    def reached() -> bool:
        nonlocal calls
        calls += 1
        return calls == crash.count

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def deadly_later(*arguments: Any, **named: Any) -> Any:
            now = reached()
            if now and crash.when == "before":
                _kill(crash, marker)
            result = await function(*arguments, **named)
            if now and crash.when == "after":
                _kill(crash, marker)
            return result

        return deadly_later

    @functools.wraps(function)
    def deadly(*arguments: Any, **named: Any) -> Any:
        now = reached()
        if now and crash.when == "before":
            _kill(crash, marker)
        result = function(*arguments, **named)
        if now and crash.when == "after":
            _kill(crash, marker)
        return result

    return deadly


def _kill(crash: Crash, marker: Path) -> None:
    marker.touch()
    if crash.victim == "call":
        raise RuntimeError(FAULT)
    agent = os.getppid()
    victims = {"itself": os.getpid, "agent": lambda: agent, "guard": lambda: _parent(agent)}
    os.kill(victims[crash.victim](), signal.SIGKILL)
    if crash.victim == "agent":
        signal.pause()  # its end is this process's end; an agent without its guard still saves the run


def _keep(
    journal: Path, snapshot: Path | None, incarnation: int, recipes: Mapping[str, str]
) -> dict[str, int]:
    """In the place of the rollback: a new incarnation goes on with the journal of the one before."""
    if not journal.exists():
        return rollback_to(journal, snapshot, incarnation, recipes)
    with contextlib.closing(sqlite3.connect(journal)) as db, db:
        db.execute("UPDATE meta SET incarnation = ?", (incarnation,))
    return {}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _node(run: Path) -> int:
    """The node program, which forks the roles."""
    from stackrl.runtime import node, supervisor

    supervisor.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
    node.write_report_aside = lambda run: None  # which no trial looks at
    return node.main(str(run))


def main() -> None:
    role, run = sys.argv[1], Path(sys.argv[2])
    install(run, role)
    if role == "node":
        sys.exit(_node(run))
    from stackrl.runtime.orchestrator import rollback

    if os.environ.get(KEEPS_JOURNAL):
        rollback.replace = _keep
    sys.argv = [sys.argv[0], str(run)]
    runpy.run_module("stackrl.runtime.orchestrator", run_name="__main__")


if __name__ == "__main__":
    main()
