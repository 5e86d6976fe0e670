"""Python programs that begin as forks of a process that has imported what they need: in no time.

Imports are most of what a light role does in its life. Apart from that, a fork is as much a process as any.
A `Starter` forks programs for the tests; in a program, `Forked` stands in the place of `subprocess.Popen`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

_LARGEST_REQUEST = 1 << 17
_IMPORT_LIMIT = 120.0
_THREAD_LIMIT = 10.0


class Starter:
    """A process that has imported ``modules``, and ends with the process that made it."""

    def __init__(self, folder: Path, *modules: str) -> None:
        """``folder``: where modules are looked for first."""
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: TextIO) -> Started:
        """Run a file with arguments; ``output``: a new file that takes what it writes."""
        answers, theirs = socket.socketpair()
        request = json.dumps([list(arguments), dict(environment)]).encode()
        with theirs:
            socket.send_fds(self._requests, [request], [theirs.fileno(), output.fileno()])
        return Started(answers, output)


class Started:
    """A program that a `Starter` forked, with as much of `subprocess.Popen` as tests need."""

    def __init__(self, answers: socket.socket, output: TextIO) -> None:
        self._socket, self._answers = answers, answers.makefile("r")
        self._output = output
        self.returncode: int | None = None
        self.pid = self._answer(_IMPORT_LIMIT)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end. What it wrote to stdout and stderr together, and nothing."""
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), ""

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._answer(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _answer(self, timeout: float | None) -> int:
        self._socket.settimeout(timeout)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            self._answers = self._socket.makefile("r")  # one that timed out is not read again
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0) from None


class Forked:
    """What the supervisor of a node program starts as its child. Only a file with arguments can be run, and
    the starter must have one thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None],
        **_as_the_supervisor_always_says: Any,
    ) -> None:
        interpreter, *arguments = command
        assert interpreter == sys.executable, command
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.pid = _fork(arguments, env, writing, preexec_fn)
        os.close(writing)
        self.stdout = io.FileIO(reading)
        self.returncode: int | None = None


def _fork(
    arguments: Sequence[str], environment: Mapping[str, str], output: int, first: Callable[[], None]
) -> int:
    """The pid of a program that leads a process group of its own."""
    _be_alone()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _live(arguments, environment, output, mask, first)
    with contextlib.suppress(ProcessLookupError):
        os.setpgid(pid, 0)  # both do it, so that neither has to wait for the other
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _be_alone() -> None:
    """Locks of other threads would stay locked in a fork. One that has ended may take a moment to be gone."""
    deadline = time.monotonic() + _THREAD_LIMIT
    while len(threads := os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < deadline, f"a program with threads {threads} cannot be forked"
        time.sleep(0.001)


def _live(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    mask: set[signal.Signals],
    first: Callable[[], None],
) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        first()
        _forget_the_starter(output, mask)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _forget_the_starter(output: int, mask: set[signal.Signals]) -> None:
    """Have what a new interpreter has: no files, no handlers of signals, none of logging."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    null = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((null, 0), (output, 1), (output, 2)):
        os.dup2(theirs, ours)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), errors="backslashreplace", write_through=True)
        for number in (1, 2)
    )
    for logger in (logging.root, logging.getLogger("stackrl")):
        logger.handlers.clear()


def _exit_code(end: SystemExit) -> int:
    """As of an interpreter that ends."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _keep(request: bytes, answers: int, output: int) -> NoReturn:
    """The parent of one program: it tells its pid, and then with what exit code it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments, environment = json.loads(request)
    pid = _fork(arguments, environment, output, lambda: None)
    os.close(output)
    os.write(answers, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(answers, f"{code}\n".encode())
    os._exit(0)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes the zombies
    while True:
        request, files, *_ = socket.recv_fds(requests, _LARGEST_REQUEST, 2)
        if not request:
            return
        if os.fork() == 0:
            _keep(request, *files)
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main()
