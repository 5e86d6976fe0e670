"""One process that starts programs, keeps their output, notices their end, and ends them all.

Single-threaded: a selector over the programs' output and a pipe that signals write to. Every program leads
a process group of its own with stdin closed, and dies with the supervisor.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from stackrl.runtime import processes
from stackrl.runtime.heartbeat import PROCESS_VARIABLE
from stackrl.runtime.monitor.lines import printable
from stackrl.runtime.run import open_private
from stackrl.runtime.stopping import Stopped

TERM_LIMIT = 20.0
"""Seconds between SIGTERM and SIGKILL."""
SERIES_SECONDS = 60.0
"""Exceptions with less time between them have one cause."""
RESTART_TERM_LIMIT = 5.0
"""The same for programs that are started again: there is nothing that they could still save."""
_LONGEST_LINE = 1 << 16
_EXCEPTION = re.compile(r"\b[\w.]*(Error|Exception): .+")


@dataclass(frozen=True)
class Program:
    """What is started: a command and what it finds in its environment besides the supervisor's own."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    endless: bool = False
    """Whether it may only end when it is told to."""
    node: int = 0
    """Where it runs."""


@dataclass
class Running:
    """A started program. ``exit`` is its exit code, or minus the signal that killed it, once it ended."""

    program: Program
    process: subprocess.Popen[bytes] | None
    """None where it runs on another node."""
    log: BinaryIO
    complaint: str = ""
    """Why it failed in its own words: its line `error: …`, else the first exception of its last series."""
    complained_at: float = -math.inf
    """When it last wrote of an exception. Monotonic."""
    last_line: str = ""
    exit: int | None = None
    ended_at: float = 0.0
    """Monotonic."""
    ended_by_us: bool = False
    verdict: str = ""
    """Why it was ended as a failure, such as `was silent for 60 s`."""
    answered: bool = False
    """Whether its failure has been dealt with."""
    _partial: bytes = b""

    @property
    def status(self) -> str:
        if self.exit is None:
            return "running"
        if self.verdict:
            return "failed"
        if self.ended_by_us:
            return "ended"
        return "done" if self.exit == 0 and not self.program.endless else "failed"

    def hear(self, line: str) -> None:
        """Take note of a line of its output."""
        self.last_line = line if line.strip() else self.last_line
        if line.startswith("error: "):
            self.complaint, self.complained_at = line.removeprefix("error: "), time.monotonic()
        elif (exception := _EXCEPTION.search(line)) and "WARNING" not in line:
            if time.monotonic() - self.complained_at > SERIES_SECONDS:
                self.complaint = exception[0]  # those that follow it are its consequences
            self.complained_at = time.monotonic()

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.verdict:
            return self.verdict
        if self.exit is None:
            return "is running"
        if self.exit >= 0:
            return f"ended with exit code {self.exit}"
        name = processes.signal_name(-self.exit)
        memory = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{memory}"


class Readable(Protocol):
    """What a selector takes."""

    def fileno(self) -> int: ...


class Supervisor:
    """Use as a context: leaving it ends everything that was started in it, however it is left."""

    def __init__(
        self,
        logs: Path,
        secret: str = "",
        show: Callable[[str, str], None] | None = None,
        complain: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Output goes to ``logs/<name>.log`` and, line by line, to ``show(name, line)``.

        ``secret`` is blotted out in both. Lines that the disk does not take are lost, which is told once by
        ``complain``.
        """
        self.running: dict[str, Running] = {}
        self._logs = logs
        self._secret = secret.encode()
        self._show = show or (lambda name, line: None)
        self._complain = complain
        self._selector = selectors.DefaultSelector()
        self._asked: list[int] = []
        self._pid, self._parent = os.getpid(), os.getppid()

    def __enter__(self) -> Supervisor:
        processes.adopt_orphans()
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for number in processes.END_SIGNALS:
            signal.signal(number, lambda received, frame: self._asked.append(received))
        signal.signal(signal.SIGCHLD, lambda received, frame: None)  # only to wake the selector
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*processes.END_SIGNALS, signal.SIGCHLD})
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def signals(self) -> int:
        """How many signals have asked for the end so far."""
        return len(self._asked)

    def start(self, program: Program, headline: str = "") -> Running:
        """Start a program now; ``headline`` goes to its log first. Raises OSError where its command cannot
        be run."""
        log = self._open_log(program.name)
        parent = self._pid
        process = subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                **program.environment,
                PROCESS_VARIABLE: program.name,
            },
            process_group=0,
            preexec_fn=lambda: processes.die_with(parent),  # this process has no threads
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        running = Running(program, process, log)
        self.running[program.name] = running
        if headline:
            self._write(running, headline.encode())
        self._selector.register(process.stdout, selectors.EVENT_READ, running)
        return running

    def turn(self, wait: float = 1.0) -> None:
        """Sleep until something happens, ``wait`` seconds at most, and take note of it. Raises Stopped."""
        self.rest(wait)
        if self._asked:
            number = self._asked[0]
            if os.getppid() != self._parent:  # its end is what sent the signal
                raise Stopped("stopped: the guard of the node program was killed", processes.LOST)
            code = 130 if number == signal.SIGINT else 1
            raise Stopped(f"stopped by {processes.signal_name(number)}", code)

    def rest(self, wait: float) -> None:
        """`turn`, though somebody has asked for the end."""
        for key, _ in self._selector.select(wait):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif isinstance(key.data, Running):
                self._read(key.data)
            else:
                key.data()
        self._reap()

    def hear(self, source: Readable, arrived: Callable[[], None]) -> None:
        """Call ``arrived`` from `turn` and `rest` whenever ``source`` can be read."""
        self._selector.register(source, selectors.EVENT_READ, arrived)

    def hear_no_more(self, source: Readable) -> None:
        self._selector.unregister(source)

    def wait_for(self, names: Iterable[str], limit: float) -> None:
        """Wait until all of ``names`` ended. Raises TimeoutError naming those that did not, and Stopped."""
        deadline = time.monotonic() + limit
        while waiting := [name for name in names if self.running[name].exit is None]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {limit:.0f} s for the end of {', '.join(waiting)}")
            self.turn()

    def end(self, limit: float = TERM_LIMIT) -> None:
        """End every program with all its descendants: SIGTERM, then SIGKILL after ``limit`` seconds, or at
        once when a further signal asks for the end."""
        self._terminate(self.running.values(), limit)
        processes.end_tree(self._pid)
        self.rest(0)
        for running in self.running.values():
            self._close(running)

    def end_some(self, names: Iterable[str], limit: float = RESTART_TERM_LIMIT) -> None:
        """End these programs, whole, in the same way, so that they can be started again; also what is left
        of those that ended by themselves."""
        some = [self.running[name] for name in names]
        self._terminate(some, limit)
        for running in some:
            self.kill(running)

    def kill(self, running: Running, verdict: str = "") -> None:
        """SIGKILL a program, whole. ``verdict``: why that counts as its failure."""
        if running.exit is None:
            running.verdict = verdict
            running.ended_by_us = not verdict
        self._kill(running)
        while running.exit is None:  # it is dead, and only to be reaped
            self.rest(0.05)
        self._close(running)

    def _kill(self, running: Running) -> None:
        mark = f"{PROCESS_VARIABLE}={running.program.name}".encode()
        processes.end_members(self._pid, running.process.pid, mark)

    def tell_to_end(self, running: Running) -> None:
        processes.send(running.process.pid, signal.SIGTERM, group=True)

    def _terminate(self, some: Iterable[Running], limit: float) -> None:
        living = [running for running in some if running.exit is None]
        for running in living:
            running.ended_by_us = True
            self.tell_to_end(running)
        deadline = time.monotonic() + limit
        patience = self.signals
        while (
            any(running.exit is None for running in living)
            and time.monotonic() < deadline
            and self.signals == patience
        ):
            self.rest(0.2)

    def _reap(self) -> None:
        """Note who ended, adopted orphans included, so that no zombie stays."""
        by_pid = {running.process.pid: running for running in self.running.values() if running.process}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (running := by_pid.get(pid)) is not None:
                running.process.returncode = os.waitstatus_to_exitcode(status)
                self._read(running)
                self._ended(running, running.process.returncode)

    def _ended(self, running: Running, code: int) -> None:
        """Take note of the end of a program."""
        running.exit, running.ended_at = code, time.monotonic()

    def _read(self, running: Running) -> None:
        """Take what the program has written so far."""
        stream = running.process.stdout if running.process else None
        if stream is None or stream.closed:
            return
        while True:
            try:
                chunk = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._close(running)
                return
            *lines, running._partial = (running._partial + chunk).split(b"\n")
            if len(running._partial) > _LONGEST_LINE:
                lines.append(running._partial)
                running._partial = b""
            for line in lines:
                self._line(running, line)

    def _line(self, running: Running, line: bytes) -> None:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]  # what a progress bar shows in the end
        if self._secret:
            line = line.replace(self._secret, b"***")
        self._write(running, line)
        text = printable(line.decode(errors="replace"))
        running.hear(text)
        self._show(running.program.name, text)

    def _open_log(self, name: str) -> BinaryIO:
        file = self._logs / f"{name}.log"
        try:
            return open(file, "ab", buffering=0, opener=open_private)
        except OSError as error:
            self._complain(f"{file} cannot be written: {error.strerror}; what {name} says is not kept")
            return open(os.devnull, "ab", buffering=0)

    def _write(self, running: Running, line: bytes) -> None:
        try:
            running.log.write(line + b"\n")
        except OSError as error:
            file = self._logs / f"{running.program.name}.log"
            self._complain(f"{file} cannot be written: {error.strerror}; lines are lost until it can")

    def _close(self, running: Running) -> None:
        if running.process is None:
            return running.log.close()
        stream = running.process.stdout
        if stream is None or stream.closed:
            return
        self._selector.unregister(stream)
        if running._partial:
            self._line(running, running._partial)
            running._partial = b""
        stream.close()
        running.log.close()
