"""The program of a node: `stackrl node` starts the roles of this machine, watches them and ends them.

It is given a stack file (under plain `sky launch`; it makes the run's folder then) or the folder of a run
that `stackrl launch` made. Two processes watch each other: the guard, whose pid is the run's, and the
supervisor below it, so that a kill of either leaves nothing behind.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stackrl.runtime.launch.admit import Planner, admit
from stackrl.runtime.launch.plan import ENGINE, Process, make_plan
from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.launch.runs import explain
from stackrl.runtime.monitor.lines import Prefixed
from stackrl.runtime.place import Place
from stackrl.runtime.processes import guarded
from stackrl.runtime.run import (
    CORES_VARIABLE,
    TOKEN_VARIABLE,
    Endpoints,
    RunError,
    RunFolder,
    State,
    create_run,
    new_token,
    runs_home,
)
from stackrl.runtime.supervisor import Program, Running, Stopped, Supervisor
from stackrl.schemas.loader import LoadedStack, load

PREPARE = (sys.executable, "-m", "stackrl.runtime.trainer.models.prepare")
PREPARE_LIMIT = 3600.0
"""Seconds for the first weights, a download included."""
FINISH_LIMIT = 900.0
"""Seconds between the first and the last end of orchestrator and trainer ranks: the model is saved then."""
SETTLE_SECONDS = 0.5
"""Time after a failure in which roles fail of the same cause, to tell cause from consequence."""


class RoleFailed(Exception):
    """A role ended before its work was done."""


def main(argument: str, *, planner: Planner = make_plan, prepare: Sequence[str] = PREPARE) -> int:
    """Work on a stack file or a run folder until it ends. 0: finished; 1: failed or ended; 130: Ctrl-C.

    ``planner`` says which processes a new run has; ``prepare`` is the command that, given the run's folder,
    makes the first weights in it.

    Raises RunError (and the loader's error) before anything is started.
    """
    place, token = Place.of(os.environ), new_token()
    os.umask(0o077)
    path = Path(argument)
    if path.is_dir():
        run, show = RunFolder(path), False  # `stackrl launch` shows it
        if not (path / "run.json").exists():
            raise RunError(f"{path} is not the folder of a run; name one of {runs_home()}, or a stack file")
    else:
        run, show = _new_run(load(path), place, planner), True
    if run.state().status == "finished":
        raise RunError(f"run {run.id} is finished; its model is in {run.final}")
    with run.kept():
        return guarded(
            lambda: _Attempt(run, token, prepare, show).work(),
            died=lambda reason: _note_death(run, reason),
        )


def _new_run(loaded: LoadedStack, place: Place, planner: Planner) -> RunFolder:
    wanted = loaded.task.get("num_nodes") or 1
    if wanted != place.nodes:
        raise RunError(
            f"{loaded.path} says `num_nodes: {wanted}`, but this task runs on {place.nodes} node(s); "
            "start it as it is written, without `--num-nodes`"
        )
    return create_run(loaded.name, loaded.path, loaded.hash, *admit(loaded, planner))


def _note_death(run: RunFolder, reason: str) -> None:
    state = run.state()
    state.status, state.reason, state.ended = "failed", reason, time.time()
    state.roles = {name: "ended" if how == "running" else how for name, how in state.roles.items()}
    run.write_state(state)
    print(explain(run), file=sys.stderr)


class _Attempt:
    """One life of a run: from raising the attempt's number to the end of its last process."""

    def __init__(self, run: RunFolder, token: str, prepare: Sequence[str], show: bool) -> None:
        self._run, self._token = run, token
        self._prepare = prepare
        self._processes = [Process(**process) for process in run.read("plan.json")["processes"]]
        self._state = _begin(run)
        names = [process.name for process in self._processes]
        self._show = Prefixed(sys.stdout, ["node", "prepare", *names]) if show else None

    def work(self) -> int:
        with Supervisor(self._run.logs(self._state.attempt), self._token, self._show) as self._supervisor:
            status, reason, code = self._outcome()
        self._note(status=status, reason=reason, ended=time.time())
        if self._show:
            for line in explain(self._run).splitlines():
                self._show("node", line)
        return code

    def _outcome(self) -> tuple[str, str, int]:
        """Do the work. Status, reason and exit code of its end."""
        try:
            self._prepare_model()
            self._start_roles()
            self._watch()
        except Stopped as stop:
            return "stopped", str(stop), 130 if stop.interrupted else 1
        except (RoleFailed, TimeoutError, OSError) as error:
            return "failed", str(error), 1
        except Exception as error:  # a fault of ours ends the run like any other
            (self._run.logs(self._state.attempt) / "node.log").write_text(traceback.format_exc())
            return "failed", f"the node program has a fault: {error!r}", 1
        return "finished", "", 0

    def _prepare_model(self) -> None:
        """Make the first weights and the tokenizer, unless an earlier attempt did."""
        if self._run.model.exists():
            return
        command = [*self._prepare, str(self._run.path)]
        self._supervisor.start(Program("prepare", command, {TOKEN_VARIABLE: self._token}))
        self._supervisor.wait_for(["prepare"], PREPARE_LIMIT)
        self._raise_failures()

    def _start_roles(self) -> None:
        """Engines first: they take longest to be ready."""
        engines = [process for process in self._processes if process.role == ENGINE]
        others = [process for process in self._processes if process.role != ENGINE]
        self._run.write("endpoints.json", asdict(_endpoints(len(engines))))
        for process in engines + others:
            self._supervisor.start(self._program(process))
        self._note(status="running")

    def _program(self, process: Process) -> Program:
        """The process with what it learns on this node: the run's folder, the token, its cores."""
        environment = {
            **process.environment,
            TOKEN_VARIABLE: self._token,
            CORES_VARIABLE: ",".join(map(str, process.cores)),
            "OMP_NUM_THREADS": str(max(1, len(process.cores))),
        }
        return Program(
            process.name, process.command_for(self._run), environment, endless=process.role == ENGINE
        )

    def _watch(self) -> None:
        """Return when orchestrator and trainer have done their work.

        Raises RoleFailed, TimeoutError and Stopped.
        """
        roles = self._supervisor.running
        workers = [process.name for process in self._processes if process.role != ENGINE]
        deadline = math.inf
        while waiting := [name for name in workers if roles[name].exit is None]:
            if len(waiting) < len(workers):
                deadline = min(deadline, time.monotonic() + FINISH_LIMIT)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{', '.join(waiting)} did not end within {FINISH_LIMIT:.0f} s of the other roles' end"
                )
            self._supervisor.turn()
            self._raise_failures()
            self._note()

    def _raise_failures(self) -> None:
        """Raise RoleFailed where a role has failed."""

        def failed() -> list[Running]:
            return [role for role in self._supervisor.running.values() if role.status == "failed"]

        if not failed():
            return
        settled = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < settled:
            self._supervisor.turn(0.1)
        raise RoleFailed(_blame(failed()))

    def _note(self, **changes: Any) -> None:
        """Write the state where it changed."""
        roles = {name: role.status for name, role in self._supervisor.running.items()}
        state = replace(self._state, roles=roles, **changes)
        if state != self._state:
            self._state = state
            self._run.write_state(state)


def _begin(run: RunFolder) -> State:
    """Raise the attempt and the incarnation, durably, before anything is started under them."""
    before = run.state()
    state = State(
        status="starting",
        attempt=before.attempt + 1,
        incarnation=before.incarnation + 1,
        began=time.time(),
    )
    run.write_state(state)
    return state


def _endpoints(engines: int, host: str = "127.0.0.1") -> Endpoints:
    orchestrator, weights, rendezvous, *ports = free_ports(3 + engines, host)
    return Endpoints(
        orchestrator=f"http://{host}:{orchestrator}",
        weights=f"http://{host}:{weights}",
        engines=[f"http://{host}:{port}" for port in ports],
        rendezvous=f"{host}:{rendezvous}",
    )


def _blame(failed: list[Running]) -> str:
    """Which role failed, how, and in its own words why.

    The cause is a role that was killed, for no role kills itself because another one failed; else the one
    that ended first.
    """
    cause, *consequences = sorted(failed, key=lambda role: (role.exit >= 0, role.ended_at))
    words = cause.complaint or cause.last_line
    why = f": {words}" if words else ""
    also = f" ({', '.join(role.program.name for role in consequences)} failed too)" if consequences else ""
    return f"{cause.program.name} {cause.how}{why}{also}"
