"""The backend of this machine: make the run's folder, start its node program, show what happens."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console

from stackrl.runtime.launch import devices, money
from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.again import environment_of, go_on, recreate
from stackrl.runtime.launch.backends import LOCAL, refuse_at_work
from stackrl.runtime.launch.fork import fork
from stackrl.runtime.launch.handle import Backend, Handle, Seen
from stackrl.runtime.launch.runs import explain, last_lines, wait_until_ended
from stackrl.runtime.monitor.records import History
from stackrl.runtime.monitor.view import follow, told_change
from stackrl.runtime.processes import send, state_of
from stackrl.runtime.run import RunError, RunFolder, create_run, find_run, new_token, open_private
from stackrl.runtime.stopping import longest_end
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import StackError
from stackrl.schemas.support import unsupported_here

START_LIMIT = 60.0
"""Seconds until a node program has taken its run."""
_EXIT_LIMIT = 5.0
NOTHING = "nothing to launch: name a stack file, or a run with `--resume RUN` or `--from RUN@STEP`"


def launch(
    source: LoadedStack | None,
    *,
    detach: bool,
    resume: str | None,
    origin: str | None = None,
    changes: Sequence[str] = (),
) -> int:
    """Start, resume or fork a run. 0: finished (or, detached, started); 1: failed or ended; 130: Ctrl-C.

    A resumed run goes on with ``source`` where one is given (other counts of processes, say), else with the
    stack it has. ``origin``, RUN@STEP, is the checkpoint of another run at which a new one begins; without
    ``source`` it has that run's stack with ``changes``. Raises StackError where this machine, or the run,
    cannot go on with ``source``, and RunError where there is no such run or it is not to be resumed.
    """
    new_token()  # a bad one in the environment is told here, not in a log
    if source is not None and (problems := unsupported_here(source.task)):
        raise StackError(source.locate(problems))
    with devices.Claims() as claims:
        run = _made(source, resume, origin, changes, claims)
        claims.sign(run.id)
        attempt, now = run.state().attempt, time.time()
        hourly = money.hourly_noted(run.stack().limits, _environment(run), 0.0)
        Handle(LOCAL, submitted=now, hourly=hourly, details={"host": socket.gethostname()}).write(run)
        node = _start_node(run, claims)
    return _let_go(run, node, attempt) if detach else _accompany(run, node, attempt, now)


def _made(
    source: LoadedStack | None,
    resume: str | None,
    origin: str | None,
    changes: Sequence[str],
    claims: devices.Claims,
) -> RunFolder:
    """The folder of a run that can begin, on devices that ``claims`` holds."""
    if resume is not None:
        return _dealt(_resumed(resume, source), claims)
    if origin is not None:
        return _dealt(fork(origin, source, changes), claims)
    if source is None:
        raise RunError(NOTHING)
    stack, plan = admit(source)
    plan = _deal(plan, source.task, claims)  # where it is refused, no folder is made
    return create_run(source.name, source.path, source.hash, stack, plan, environment_of(source))


def _resumed(name: str, source: LoadedStack | None) -> RunFolder:
    """The run called ``name``, ready to go on; where its folder is gone, made anew from its checkpoints."""
    try:
        run = find_run(name)
    except RunError:
        run = source and recreate(name, source, environment=environment_of(source))
        if run is None:
            raise
        print(f"run {run.id} goes on from its checkpoints; its folder was gone", file=sys.stderr)
        return run
    refuse_at_work(run)
    if run.state().status == "finished":
        raise RunError(f"run {run.id} is finished; its model is in {run.final}")
    return go_on(run, source, environment=environment_of(source)) if source is not None else run


def _dealt(run: RunFolder, claims: devices.Claims) -> RunFolder:
    """``run`` with devices that are free now, which need not be those that it had before."""
    task = yaml.safe_load((run.path / "source.yaml").read_text()) or {}
    run.write("plan.json", _deal(run.read("plan.json"), task, claims))
    return run


def _deal(plan: dict[str, Any], task: Mapping[str, Any], claims: devices.Claims) -> dict[str, Any]:
    """As `devices.deal`, and tell what a person should know of it."""
    resources = task.get("resources")
    cpus = re.match(r"\d+", str(resources.get("cpus", ""))) if isinstance(resources, dict) else None
    dealt = devices.deal(plan, claims, int(cpus[0]) if cpus else None, os.environ)
    for note in claims.notes:
        print(f"note: {note}", file=sys.stderr)
    return dealt


def _start_node(run: RunFolder, claims: devices.Claims) -> subprocess.Popen[bytes]:
    """Its own session: a closed terminal leaves it going. It makes the run's token itself, and keeps what was
    claimed for it."""
    (run.path / "logs").mkdir(mode=0o700, exist_ok=True)
    with open(run.path / "logs" / "node.log", "ab", opener=open_private) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "stackrl", "node", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=claims.descriptors,
            env=_environment(run),
        )


def _environment(run: RunFolder) -> dict[str, str]:
    """This process's, and what the stack says."""
    return os.environ | run.read("run.json").get("environment", {})


def _let_go(run: RunFolder, node: subprocess.Popen[bytes], attempt: int) -> int:
    """Wait until the node program has taken the run, and say how to go on."""
    deadline = time.monotonic() + START_LIMIT
    try:
        while run.state().attempt == attempt:
            if node.poll() is not None:
                return _not_started(run)
            if time.monotonic() > deadline:
                node.terminate()
                raise RunError(f"the node program did not start within {START_LIMIT:.0f} s; {_node_log(run)}")
            time.sleep(0.05)
    except KeyboardInterrupt:
        node.send_signal(signal.SIGINT)  # Ctrl-C does not reach it, for it has its own session
        node.wait(longest_end(run) + 30)
        raise
    print(run.id)
    print(explain(run), file=sys.stderr)
    return 0


def _accompany(run: RunFolder, node: subprocess.Popen[bytes], attempt: int, since: float) -> int:
    """Show the run until its end. Ctrl-C and SIGTERM end it; a second one at once."""
    before = {
        number: signal.signal(number, lambda received, frame: node.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        try:
            history = follow(run, lambda: node.poll() is None, Console(stderr=True), since)
        except (BrokenPipeError, SystemExit):  # nobody reads any more, which rich answers by an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            node.wait()
            history = follow(run, lambda: False, Console(stderr=True), since)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if run.state().attempt == attempt:
        return _not_started(run)
    print(explain(run), file=sys.stderr)
    if run.state().status == "finished":
        _tell_result(run, history)
    return node.returncode if node.returncode >= 0 else 1  # killed


def _tell_result(run: RunFolder, history: History) -> None:
    """What was learnt and where it is; the path of the model is the result on standard output."""
    for stage, before, after in history.gains():
        print(
            f"  {stage:<8} reward {before:.3f} → {after:.3f} over its first and last training steps",
            file=sys.stderr,
        )
        if evaluated := told_change(history.evaluations.get(stage, {})):
            print(f"  {'':<8} {evaluated} on the evaluation's own prompts", file=sys.stderr)
    print(f"  metrics  {run.metrics}", file=sys.stderr)
    print(f"  next     `stackrl status {run.id}`, `stackrl logs {run.id}`", file=sys.stderr)
    print(run.final)


def _not_started(run: RunFolder) -> int:
    print(
        f"run {run.id} did not start: {_node_log(run)}; what may be missing: `stackrl doctor`",
        file=sys.stderr,
    )
    return 1


def _node_log(run: RunFolder) -> str:
    log = run.path / "logs" / "node.log"
    return "\n".join([f"the last lines of {log}:", *(f"    {line}" for line in last_lines(log, 12))])


class ThisMachine:
    """What can be asked of runs that `launch` above has started."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        return launch(source, detach=detach, resume=None)

    def resume(self, run: RunFolder, infra: str, source: LoadedStack | None, *, detach: bool) -> int:
        return launch(source, detach=detach, resume=run.id)

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        """The lock of its node program tells, also where another machine sees the same folder."""
        if (pid := run.keeper()) is None:
            return Seen("ended")
        host = self._elsewhere(handle)
        return Seen("running", f"process {pid} of {host}" if host else f"process {pid}")

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        """SIGTERM lets it save what it has learnt; a second one, from a second call, ends it at once."""
        if (pid := run.keeper()) is None:
            return []
        if host := self._elsewhere(handle):
            return [f"process {pid} of {host}: type `stackrl down {run.id}` there"]
        send(pid, signal.SIGTERM)
        limit = longest_end(run) + 30
        if not wait_until_ended(run, limit):
            return [f"its node program, process {pid}, which did not end within {limit:.0f} s"]
        deadline = time.monotonic() + _EXIT_LIMIT  # its devices are free when it has gone
        while state_of(pid) not in ("", "Z") and time.monotonic() < deadline:
            time.sleep(0.02)
        return []

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        """In the folder of the run, with the environment of its stack."""
        if host := self._elsewhere(handle):
            raise RunError(f"run {run.id} is on {host}; type this there")
        if node:
            raise RunError(f"run {run.id} has one node, this machine: --node 0")
        return subprocess.run(command, cwd=run.path, env=_environment(run), check=False).returncode

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        return None

    @staticmethod
    def _elsewhere(handle: Handle) -> str:
        """The machine that started it, where that is not this one and both see its folder."""
        host = handle.details.get("host", "")
        return host if host != socket.gethostname() else ""


BACKEND: Backend = ThisMachine()
