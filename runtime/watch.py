"""What the node program looks at while its roles work: signs of life, progress, and the limits of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from stackrl.runtime import processes
from stackrl.runtime.heartbeat import DUMP_SIGNAL, Listener
from stackrl.runtime.launch import money
from stackrl.runtime.launch.planning.plan import ORCHESTRATOR
from stackrl.runtime.nodes.crew import Crew
from stackrl.runtime.notes import Notes
from stackrl.runtime.run import RunFolder
from stackrl.runtime.stopping import out_of_hours, out_of_money, preempted
from stackrl.runtime.supervisor import Supervisor
from stackrl.schemas.limits import Limits

DUMP_SECONDS = 2.0
"""Time in which a process writes its stacks."""
_SUSPENDED_SECONDS = 5.0


class Idle(Exception):
    """Nothing has been achieved for too long. The text names who was waited for."""


class SignsOfLife:
    """The eyes on the processes of one node."""

    def __init__(self, listener: Listener, supervisor: Supervisor) -> None:
        self._listener, self._supervisor = listener, supervisor

    def end_silent(self, pids: Mapping[str, int]) -> None:
        """SIGKILL processes that give no sign of life, which makes them failed; their stacks come first."""
        if silent := self._listener.silent(pids):
            self.dump_stacks({name: pids[name] for name in silent})
            for name, words in silent.items():
                if (running := self._supervisor.running[name]).exit is None:
                    self._supervisor.kill(running, verdict=words)

    def dump_stacks(self, pids: Mapping[str, int]) -> None:
        """Ask these processes for the stacks of their threads, which go to their logs."""
        for name, pid in pids.items():
            for beating in self._listener.beating(name, pid):
                processes.send(beating, DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self._supervisor.rest(left)


class Watch(SignsOfLife):
    """The eyes on one attempt."""

    def __init__(
        self, run: RunFolder, limits: Limits, listener: Listener, supervisor: Crew, notes: Notes
    ) -> None:
        super().__init__(listener, supervisor)
        self._run, self._limits, self._crew = run, limits, supervisor
        self._hourly = money.hourly_on_node(run, os.environ)
        self._notes = notes
        self._achieved: tuple[object, object] | None = None
        self._achieved_at = self._looked_at = time.monotonic()

    def orchestrator(self, pids: Mapping[str, int]) -> dict[str, Any]:
        """What the orchestrator said last; {} where it is not there."""
        pid = pids.get(ORCHESTRATOR)
        return {} if pid is None else self._listener.says(ORCHESTRATOR, pid)

    def mind_idleness(self, pids: Mapping[str, int]) -> None:
        """Raises Idle, after dumping the stacks of all roles."""
        now, said = time.monotonic(), self.orchestrator(pids)
        if now - self._looked_at > _SUSPENDED_SECONDS:  # this process was stopped itself
            self._achieved_at += now - self._looked_at
        self._looked_at = now
        achieved = (said.get("index"), said.get("finished"))
        if achieved != self._achieved:
            self._achieved, self._achieved_at = achieved, now
        if now - self._achieved_at > self._limits.idle_minutes * 60:
            self._crew.dump_stacks_elsewhere()
            self.dump_stacks(pids)
            raise Idle(self._idle_words(said))

    def mind_ends(self) -> None:
        """Raises Stopped where the run's hours or money are over or its machine is being taken away."""
        if self._run.preempt.exists():
            raise preempted()
        hours = self._limits.hours
        if hours is not None and self._notes.used > hours * 3600:
            raise out_of_hours(hours)
        if self._limits.cost is not None and money.spent(self._limits, self._hourly, self._notes.used):
            raise out_of_money(self._limits.cost)

    def _idle_words(self, said: Mapping[str, Any]) -> str:
        limit = f"{self._limits.idle_minutes:g} min (limits.idle_minutes)"
        doing = said.get("doing")
        why = (
            f"the orchestrator was {doing} for {(time.time() - said['since']) / 60:.1f} min"
            if doing
            else "the orchestrator said nothing"
        )
        return f"no rollout was finished and no optimizer step taken for {limit}: {why}; stacks in the logs"
