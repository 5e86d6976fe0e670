"""What the node program looks at while its roles work: signs of life, progress, and the limits of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stackrl.runtime import processes
from stackrl.runtime.heartbeat import DUMP_SIGNAL, Listener
from stackrl.runtime.launch.plan import ORCHESTRATOR
from stackrl.runtime.notes import Notes
from stackrl.runtime.run import RunFolder
from stackrl.runtime.stopping import out_of_hours, preempted
from stackrl.runtime.supervisor import Supervisor
from stackrl.schemas.limits import Limits

DUMP_SECONDS = 2.0
"""Time in which a process writes its stacks."""
_SUSPENDED_SECONDS = 5.0


class Idle(Exception):
    """Nothing has been achieved for too long. The text names who was waited for."""


class Watch:
    """The eyes on one attempt."""

    def __init__(
        self, run: RunFolder, limits: Limits, listener: Listener, supervisor: Supervisor, notes: Notes
    ) -> None:
        self._run, self._limits, self._listener = run, limits, listener
        self._supervisor, self._notes = supervisor, notes
        self._achieved: tuple[object, object] | None = None
        self._achieved_at = self._looked_at = time.monotonic()

    def orchestrator(self, pids: Mapping[str, int]) -> dict[str, Any]:
        """What the orchestrator said last; {} where it is not there."""
        pid = pids.get(ORCHESTRATOR)
        return {} if pid is None else self._listener.says(ORCHESTRATOR, pid)

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
            self.dump_stacks(pids)
            raise Idle(self._idle_words(said))

    def mind_ends(self) -> None:
        """Raises Stopped where the run's hours are over or its machine is being taken away."""
        if self._run.preempt.exists():
            raise preempted()
        hours = self._limits.hours
        if hours is not None and self._notes.used > hours * 3600:
            raise out_of_hours(hours)

    def _idle_words(self, said: Mapping[str, Any]) -> str:
        limit = f"{self._limits.idle_minutes:g} min (limits.idle_minutes)"
        doing = said.get("doing")
        why = (
            f"the orchestrator was {doing} for {(time.time() - said['since']) / 60:.1f} min"
            if doing
            else "the orchestrator said nothing"
        )
        return f"no rollout was finished and no optimizer step taken for {limit}: {why}; stacks in the logs"
