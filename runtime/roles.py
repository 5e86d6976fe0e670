"""The processes of a run, on all its nodes: started under an incarnation, ended, and started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.heartbeat import HEARTBEATS_VARIABLE, Listener
from stackrl.runtime.launch.backends import LOCAL
from stackrl.runtime.launch.devices import among_visible
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.planning.plan import ENGINE, ORCHESTRATOR, Process
from stackrl.runtime.nodes.crew import Crew, contents
from stackrl.runtime.nodes.follower import PYTHON
from stackrl.runtime.notes import Notes
from stackrl.runtime.place import Place
from stackrl.runtime.restarts import Restart
from stackrl.runtime.run import ADDRESS_VARIABLE, CORES_VARIABLE, TOKEN_VARIABLE, Endpoints, RunFolder
from stackrl.runtime.supervisor import Program, Running

ANEW = ("endpoints.json", "state.json", "restore.json")
"""What of the run's folder changes with an incarnation."""
LEAVE_LIMIT = 120.0
"""Seconds after which an engine that leaves is ended, whatever the orchestrator still does with it."""


class RoleFailed(Exception):
    """A role ended before its work was done, and is not started again."""


class Roles:
    """Engines, orchestrator and trainer ranks; the last two are the workers, which live and end together."""

    def __init__(
        self,
        run: RunFolder,
        processes: Sequence[Process],
        place: Place,
        token: str,
        supervisor: Crew,
        notes: Notes,
        listener: Listener,
    ) -> None:
        self._run, self._place, self._token = run, place, token
        self._supervisor, self._notes, self._listener = supervisor, notes, listener
        self._processes = {process.name: process for process in processes}
        self._engines = [process.name for process in processes if process.role == ENGINE]
        self.workers = [process.name for process in processes if process.role != ENGINE]
        self._starts: Counter[str] = Counter()
        self._leaving: dict[str, _Leaving] = {}

    @property
    def engines(self) -> list[str]:
        """This list changes as engines join and leave."""
        return self._engines

    @property
    def leaving(self) -> dict[str, Process]:
        """Engines that are no longer planned, and have not ended."""
        return {name: leaving.process for name, leaving in self._leaving.items()}

    @property
    def ranks(self) -> list[str]:
        return [name for name in self.workers if name != ORCHESTRATOR]

    def running(self) -> dict[str, Running]:
        """Processes that were started and have not ended."""
        return {
            name: running
            for name, running in self._supervisor.running.items()
            if name in self._processes and running.exit is None
        }

    def pids(self) -> dict[str, int]:
        """Of those on this node; the other nodes watch theirs themselves."""
        return {name: one.process.pid for name, one in self.running().items() if one.process is not None}

    def failures(self) -> list[Running]:
        """Those that failed and whose failure has not been dealt with: the cause before its consequences.

        The cause is a process that was killed, for none kills itself because another one failed; else the
        one that ended first.
        """
        failed = [
            running
            for name, running in self._supervisor.running.items()
            if name in self._processes and running.status == "failed" and not running.answered
        ]
        return sorted(failed, key=lambda running: (running.exit >= 0, running.ended_at))

    def done(self) -> list[str]:
        """Workers that have done their work."""
        return [
            name
            for name in self.workers
            if (running := self._supervisor.running.get(name)) and running.status == "done"
        ]

    def start(self) -> None:
        """Engines first: they take longest to be ready."""
        self._begin_incarnation(self._new_endpoints(self._engines))
        self._supervisor.share(contents(self._run.path, ANEW))
        for name in self._engines:
            self._start(name)
        self._choose_checkpoint()
        self._supervisor.share(contents(self._run.path, ANEW))
        for name in self.workers:
            self._start(name)

    def end(self, names: Sequence[str]) -> None:
        """End processes that are to be started again, and whatever is left of them."""
        started = [name for name in names if name in self._supervisor.running]
        self._supervisor.end_some(started)
        for name in started:
            self._listener.forget(name)

    def start_again(self, restart: Restart) -> None:
        """Do a restart that is due. Raises OSError."""
        if restart.new_incarnation:
            before, anew = self._run.endpoints(), self._new_endpoints([])
            self._begin_incarnation(replace(anew, engines=before.engines, pools=before.pools))
            self._choose_checkpoint()
            self._supervisor.share(contents(self._run.path, ANEW))
        for name in restart.processes:
            self._start(name, restart.reason)

    def join(self, process: Process) -> None:
        """Start one more engine. Raises OSError."""
        address = self._place.addresses[process.node]
        [port] = self._supervisor.free_ports(process.node, 1, address)
        self._processes[process.name] = process
        self._engines.append(process.name)
        self._change_endpoints(process, f"http://{address}:{port}")
        self._start(process.name, "it joins the run")

    def leave(self, name: str) -> None:
        """Take an engine out of the run; `see_off` ends it. Raises OSError."""
        process = self._processes[name]
        url = self._run.endpoints().engines[process.index]
        self._change_endpoints(process, "")
        del self._processes[name]
        self._engines.remove(name)
        self._leaving[name] = _Leaving(process, url, time.monotonic() + LEAVE_LIMIT)

    def see_off(self, in_use: Collection[str] | None) -> None:
        """End the engines that leave and that the orchestrator has let go of. ``in_use``: URLs of those that
        it still asks something; None where it says nothing."""
        now = time.monotonic()
        for name, leaving in list(self._leaving.items()):
            if now > leaving.until or (in_use is not None and leaving.url not in in_use):
                del self._leaving[name]
                self.end([name])

    def _change_endpoints(self, process: Process, url: str) -> None:
        endpoints = self._run.endpoints()
        engines, pools = list(endpoints.engines), list(endpoints.pools)
        missing = process.index + 1 - len(engines)
        engines += [""] * missing
        pools += ["inference"] * (len(engines) - len(pools))
        engines[process.index], pools[process.index] = url, process.pool
        self._run.write("endpoints.json", asdict(replace(endpoints, engines=engines, pools=pools)))
        self._supervisor.share(contents(self._run.path, ("plan.json", *ANEW)))

    def _begin_incarnation(self, endpoints: Endpoints) -> None:
        """Its number is on disk before anything is started under it."""
        self._notes.change_durably(incarnation=self._notes.state.incarnation + 1)
        self._run.write("endpoints.json", asdict(endpoints))

    def _choose_checkpoint(self) -> None:
        """Once for all roles. Reading a large one takes time, in which the programs are still listened to."""
        path, found = self._run.checkpoints(self._run.stack()), list[Path | BaseException | None]()

        def search() -> None:
            try:
                found.append(checkpoints.newest(path))
            except BaseException as error:  # raised below, in the thread that can deal with it
                found.append(error)

        searching = threading.Thread(target=search, daemon=True)
        searching.start()
        while searching.is_alive():
            self._supervisor.turn(0.05)
        [chosen] = found
        if isinstance(chosen, BaseException):
            raise chosen
        incarnation = self._notes.state.incarnation
        if chosen or incarnation > 1:
            source = chosen or f"the beginning: there is no checkpoint in {path} that can be used"
            self._notes.say(f"incarnation {incarnation} starts from {source}")
        self._run.write_restore(incarnation, chosen)

    def _start(self, name: str, reason: str = "") -> None:
        self._starts[name] += 1
        headline = ""
        if again := self._starts[name] - 1:
            headline = f"--- started again ({again}) at {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}"
        self._supervisor.start(self._program(self._processes[name]), headline)

    def _program(self, process: Process) -> Program:
        """The process with what it learns on its node: that node's address and cores, and, on this node, the
        run's folder and the token, which other nodes have themselves."""
        environment = {
            **process.environment,
            ADDRESS_VARIABLE: self._place.addresses[process.node],
            CORES_VARIABLE: ",".join(map(str, process.cores)),
            "OMP_NUM_THREADS": str(max(1, len(process.cores))),
        }
        command = [PYTHON, *process.command]
        if process.node == 0:
            if Handle.of(self._run).backend != LOCAL:  # else the plan has this machine's own numbers
                environment = among_visible(environment, os.environ)
            environment |= {TOKEN_VARIABLE: self._token, HEARTBEATS_VARIABLE: str(self._run.heartbeats)}
            command = process.command_for(self._run)
        endless = process.role == ENGINE
        return Program(process.name, command, environment, endless, node=process.node)

    def _new_endpoints(self, engines: Sequence[str]) -> Endpoints:
        """Free addresses for everybody, each on its own node."""
        planned = {self._processes[name].index: self._processes[name] for name in engines}
        numbers = range(max(planned, default=-1) + 1)
        wanted = Counter([0, 0, 0, *(process.node for process in planned.values())])
        free = {
            node: iter(self._supervisor.free_ports(node, count, self._place.addresses[node]))
            for node, count in wanted.items()
        }

        def address(node: int) -> str:
            return f"{self._place.addresses[node]}:{next(free[node])}"

        return Endpoints(
            orchestrator=f"http://{address(0)}",
            weights=f"http://{address(0)}",
            rendezvous=address(0),
            engines=[f"http://{address(planned[n].node)}" if n in planned else "" for n in numbers],
            pools=[planned[n].pool if n in planned else "inference" for n in numbers],
        )


@dataclass(frozen=True)
class _Leaving:
    """An engine on its way out of the run."""

    process: Process
    url: str
    until: float
    """Monotonic."""


def words(running: Running) -> str:
    """How a process failed, and in its own words why. One that was killed could not say: its last line is
    of something else."""
    killed = running.exit == -signal.SIGKILL
    why = running.complaint or ("" if killed else running.last_line)
    return f"{running.program.name} {running.how}{f': {why}' if why else ''}"


def blame(failed: Sequence[Running]) -> str:
    """``failed`` in words, its first the cause of the others."""
    cause, *consequences = failed
    names = ", ".join(running.program.name for running in consequences)
    return f"{words(cause)}{f' ({names} failed too)' if names else ''}"
