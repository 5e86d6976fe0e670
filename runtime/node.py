"""The program of a node: `stackrl node` starts the roles of a run, watches them and ends them.

It is given a stack file (under plain `sky launch`; it makes the run's folder then) or the folder of a run
that `stackrl launch` made. Two processes watch each other: the guard, whose pid is the run's, and the
supervisor below it, so that a kill of either leaves nothing behind. On several nodes the one of rank 0 does
this for all, and the others do what it says (nodes/follower.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from stackrl.runtime import preemption, restarts
from stackrl.runtime.assignment import is_done, refuse_place, refuse_spent, run_of
from stackrl.runtime.heartbeat import Listener
from stackrl.runtime.launch.admit import Planner
from stackrl.runtime.launch.planning.plan import ORCHESTRATOR, Process, make_plan
from stackrl.runtime.launch.reporting import write_report_aside
from stackrl.runtime.launch.runs import explain
from stackrl.runtime.monitor.lines import Prefixed
from stackrl.runtime.monitor.notify import tell_end
from stackrl.runtime.nodes.beginning import gather, prepare, preparing, turn_away
from stackrl.runtime.nodes.crew import Crew
from stackrl.runtime.nodes.follower import follow
from stackrl.runtime.notes import NODE, Notes, tell, write_end
from stackrl.runtime.place import Place
from stackrl.runtime.processes import LOST, guarded, send
from stackrl.runtime.restarts import STOPPED_BY_GUARD, Failure, GivenUp, Restarts
from stackrl.runtime.roles import RoleFailed, Roles, blame, words
from stackrl.runtime.run import RunError, RunFolder, new_token, runs_home
from stackrl.runtime.scaling import Scaling
from stackrl.runtime.stopping import SAVE_SIGNAL, Stopped, longest_end
from stackrl.runtime.supervisor import Program, Running
from stackrl.runtime.transport import held_folder
from stackrl.runtime.watch import Idle, Watch
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

PREPARE = (sys.executable, "-m", "stackrl.runtime.trainer.models.prepare")
FINISH_LIMIT = 900.0
"""Seconds between the first and the last end of orchestrator and trainer ranks: the model is saved then."""
SETTLE_SECONDS = 0.5
"""Time after a failure in which roles fail of the same cause, to tell cause from consequence."""
PREEMPTION = "preemption"
MOST_FRUITLESS = 5
"""Starts in a row that may end with LOST before an optimizer step was done."""


def main(argument: str, *, planner: Planner = make_plan, prepare: Sequence[str] = PREPARE) -> int:
    """Work on a stack file or a run folder until it ends. 0: finished; 1: failed or ended; 130: Ctrl-C;
    75: the machine is being taken away, or the node program was killed: start it again.

    ``planner`` says which processes a new run has; ``prepare`` is the command that, given the run's folder,
    makes the first weights in it.

    Raises RunError (and the loader's error) before anything is started.
    """
    began, place, token = time.time(), Place.of(os.environ), new_token()
    os.umask(0o077)
    path = Path(argument)
    if path.is_dir() and not (path / "run.json").exists():
        raise RunError(f"{path} is not the folder of a run; name one of {runs_home()}, or a stack file")
    loaded = None if path.is_dir() else load(path)
    refuse_place(place, loaded, None if loaded else RunFolder(path))
    if place.rank > 0:
        return follow(place, token, loaded.hash if loaded else RunFolder(path).read("run.json")["hash"])
    try:
        run = run_of(loaded, place, planner) if loaded else RunFolder(path)
        if done := is_done(run):
            tell(explain(run))
        else:
            refuse_spent(run)
    except (RunError, StackError) as error:
        turn_away(place, token, "refused", why=f"node 0 refused: {error}")
        raise
    if done:
        turn_away(place, token, "farewell", code=0)
        return 0
    show = loaded is not None  # else `stackrl launch` shows it
    with run.kept():
        _forget_notice(run, began)
        code = guarded(
            lambda: _work(run, place, token, prepare, show),
            died=lambda reason: _note_death(run, reason),
            limit=longest_end(run),
        )
        tell_end(run)
        write_report_aside(run)
        return code


def _forget_notice(run: RunFolder, began: float) -> None:
    """A notice that came while this program began is not of an earlier attempt, and stays."""
    with contextlib.suppress(FileNotFoundError):
        if run.preempt.stat().st_mtime < began:
            run.preempt.unlink()


def _note_death(run: RunFolder, reason: str) -> None:
    state = run.state()
    state.status, state.reason, state.ended = "failed", reason, time.time()
    state.roles = {name: "ended" if how == "running" else how for name, how in state.roles.items()}
    write_end(run, state)
    tell(explain(run))


def _work(run: RunFolder, place: Place, token: str, prepare: Sequence[str], show: bool) -> int:
    try:
        attempt = _Attempt(run, place, token, prepare, show)
    except OSError as error:
        tell(f"run {run.id} cannot begin: {error}; make room in {run.path}, or see whose it is")
        return 1
    return attempt.work()


class _Attempt:
    """One life of a run: from raising the attempt's number to the end of its last process."""

    def __init__(self, run: RunFolder, place: Place, token: str, prepare: Sequence[str], show: bool) -> None:
        self._run, self._place, self._token = run, place, token
        self._prepare = prepare
        self._limits = run.stack().limits
        self._processes = [Process(**process) for process in run.read("plan.json")["processes"]]
        names = [NODE, *preparing(place), PREEMPTION, *(process.name for process in self._processes)]
        self._notes = Notes(run, Prefixed(sys.stdout, names) if show else None)
        self._listener = Listener(run.heartbeats, self._limits.silence_seconds)
        self._first_index: int | None = None
        self._progressed = False

    def work(self) -> int:
        notes = self._notes
        logging.getLogger("stackrl").addHandler(notes.logging())
        silence = self._limits.silence_seconds
        supervisor = Crew(notes.logs, self._token, notes.show, notes.complain, silence=silence)
        self._supervisor = supervisor
        self._roles = Roles(
            self._run, self._processes, self._place, self._token, supervisor, notes, self._listener
        )
        self._watch = Watch(self._run, self._limits, self._listener, supervisor, notes)
        self._restarts = Restarts(self._roles.engines, ORCHESTRATOR, self._roles.ranks, self._limits.restarts)
        self._scaling = Scaling(self._run, self._roles, self._restarts, notes)
        with supervisor:
            status, reason, code, fruitless = self._judged(*self._outcome())
            supervisor.dismiss(code)
        held_folder.sweep()  # what killed engines held in memory
        ended, roles = time.time(), self._statuses()
        notes.end(status=status, reason=reason, ended=ended, roles=roles, fruitless=fruitless)
        for line in explain(self._run).splitlines():
            notes.show(NODE, line)
        return code

    def _judged(self, status: str, reason: str, code: int) -> tuple[str, str, int, int]:
        """An outcome, and the fruitless starts so far: who starts a run again for LOST does so for ever."""
        fruitless = 0 if code != LOST or self._progressed else self._notes.state.fruitless + 1
        if fruitless <= MOST_FRUITLESS:
            return status, reason, code, fruitless
        why = f"{reason}; {fruitless} starts in a row ended like this before an optimizer step was done"
        return "failed", why, 1, 0

    def _outcome(self) -> tuple[str, str, int]:
        """Do the work. Status, reason and exit code of its end."""
        try:
            self._clean()
            gather(self._run, self._place, self._token, self._processes, self._supervisor, self._notes)
            prepare(self._run, self._place, self._token, self._prepare, self._supervisor)
            self._start()
            self._until_done()
        except Stopped as stop:
            self._save_first(str(stop))
            return "stopped", str(stop), stop.code
        except (RoleFailed, Idle, TimeoutError, OSError) as error:
            return "failed", str(error), 1
        except Exception as error:  # a fault of ours ends the run like any other
            self._notes.say(traceback.format_exc())
            return "failed", f"the node program has a fault: {error!r}", 1
        return "finished", "", 0

    def _clean(self) -> None:
        """Take away what an earlier attempt left."""
        self._run.heartbeats.mkdir(mode=0o700, exist_ok=True)
        for file in self._run.heartbeats.iterdir():
            file.unlink()

    def _start(self) -> None:
        self._roles.start()
        if preemption.watched(os.environ):
            command = [sys.executable, "-m", "stackrl.runtime.preemption", str(self._run.path)]
            self._supervisor.start(Program(PREEMPTION, command))
        self._note(status="running")

    def _until_done(self) -> None:
        """Return when orchestrator and trainer have done their work, restarts included.

        Raises RoleFailed, Idle, TimeoutError and Stopped.
        """
        deadline = math.inf
        while len(done := self._roles.done()) < len(self._roles.workers):
            self._supervisor.turn(min(1.0, self._restarts.seconds_left(time.monotonic())))
            self._watch.end_silent(self._roles.pids())
            self._answer_failures()
            self._start_due()
            pids = self._roles.pids()
            self._scaling.turn(self._watch.orchestrator(pids))
            self._mind_progress(pids)
            self._watch.mind_idleness(pids)
            self._watch.mind_ends()
            self._note()
            if not done or self._restarts.pending:
                deadline = time.monotonic() + FINISH_LIMIT
            if time.monotonic() > deadline:
                waiting = ", ".join(name for name in self._roles.workers if name not in done)
                limit = f"within {FINISH_LIMIT:.0f} s of the other roles' end"
                raise TimeoutError(f"{waiting} did not end {limit}")

    def _answer_failures(self) -> None:
        """Decide who is started again, and end what has to end before. Raises RoleFailed."""
        if not self._roles.failures():
            return
        settled = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < settled:
            self._supervisor.turn(0.1)
        failed = self._roles.failures()
        for running in failed:
            running.answered = True
            name = running.program.name
            failure = Failure(name, words(running), running.exit)
            try:
                restart = self._restarts.failed(failure, time.monotonic(), self._roles.done())
            except GivenUp as end:
                if name == ORCHESTRATOR and running.exit == STOPPED_BY_GUARD:
                    raise Stopped(running.complaint) from None
                others = [other for other in failed if other is not running]
                also = f" ({', '.join(other.program.name for other in others)} failed too)" if others else ""
                raise RoleFailed(f"{end}{also}") from None
            if restart is not None:
                self._tell(name, restart)
                self._roles.end(restart.processes)

    def _tell(self, name: str, restart: restarts.Restart) -> None:
        seconds = restart.at - time.monotonic()
        who = "orchestrator and trainer" if restart.new_incarnation else name
        self._notes.say(f"{restart.reason}; {who} will be started again in {seconds:.0f} s")

    def _start_due(self) -> None:
        """Do the restarts whose pause is over."""
        for restart in self._restarts.due(time.monotonic()):
            try:
                self._roles.start_again(restart)
            except OSError as error:  # a full disk, say, which may have room later
                self._not_started(restart, error)
                continue
            for name in restart.processes:
                self._notes.event(
                    "restarted",
                    process=name,
                    reason=restart.reason,
                    count=restart.count,
                    incarnation=self._notes.state.incarnation,
                )

    def _not_started(self, restart: restarts.Restart, error: OSError) -> None:
        """Try again after the next pause. Raises RoleFailed."""
        self._roles.end(restart.processes)
        first = restart.processes[0]
        try:
            again = self._restarts.failed(
                Failure(first, f"{first} cannot be started again: {error}"), time.monotonic()
            )
        except GivenUp as end:
            raise RoleFailed(str(end)) from None
        if again is not None:
            self._tell(first, again)

    def _mind_progress(self, pids: dict[str, int]) -> None:
        index = self._watch.orchestrator(pids).get("index")
        if isinstance(index, int):
            self._restarts.progressed(index)
            self._first_index = index if self._first_index is None else self._first_index
            self._progressed = index > self._first_index

    def _save_first(self, reason: str) -> None:
        """Before a run that goes well is stopped: a checkpoint of the optimizer step that runs.

        It takes `limits.stop_seconds` at most. A further signal ends it, and so does the end of any role.
        """
        pids = self._roles.pids()
        said = self._watch.orchestrator(pids)
        trained = said.get("index", 0) > said.get("checkpoint", math.inf)
        saves = trained and not self._failed_workers()
        self._notes.event("stopping", reason=reason, saves=saves)
        self._notes.say(f"{reason}{'; saving' if saves else ''}")
        if not saves:
            return
        send(pids[ORCHESTRATOR], signal.Signals[SAVE_SIGNAL])
        deadline, signals = time.monotonic() + self._limits.stop_seconds, self._supervisor.signals
        while len(self._roles.done()) < len(self._roles.workers):
            self._supervisor.rest(0.2)
            if failed := self._failed_workers():
                return self._notes.say(f"not saved: {blame(failed)}")
            if self._supervisor.signals > signals:
                return self._notes.say("not waiting for the checkpoint: told to end again")
            if time.monotonic() > deadline:
                limit = f"{self._limits.stop_seconds:.0f} s (limits.stop_seconds)"
                return self._notes.say(f"no checkpoint was made within {limit}: {said.get('doing')}")

    def _failed_workers(self) -> list[Running]:
        return [role for role in self._roles.failures() if role.program.name in self._roles.workers]

    def _note(self, **changes: object) -> None:
        self._notes.change(roles=self._statuses(), **changes)

    def _statuses(self) -> dict[str, str]:
        return {
            name: running.status for name, running in self._supervisor.running.items() if name != PREEMPTION
        }
