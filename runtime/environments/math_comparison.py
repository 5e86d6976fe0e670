"""Whether two answers of mathematics are equal: math-verify, in processes that may be ended.

An answer such as 9^{9^{9^9}} keeps a computer busy for ever, and no thread of Python can be ended: each
comparison is done by one of a few processes of ours, which is replaced when it takes too long.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections import deque
from typing import Any

LIMIT = 5
"""Seconds for a comparison."""
START_LIMIT = 120.0
"""Seconds for a process to be ready: sympy is large."""
PROCESSES = min(4, os.cpu_count() or 1)
LONGEST = 2000
"""Letters of an answer that is compared."""


class ReferenceProblem(Exception):
    """A reference answer that nothing can be compared with. It is the data that is wrong, not the model."""


class Comparison:
    """A pool of graders. They start when they are needed and end with this process."""

    def __init__(self, processes: int = PROCESSES, limit: int = LIMIT) -> None:
        self._limit = limit
        self._free = threading.Semaphore(processes)
        self._idle: deque[_Grader] = deque()

    def equal(self, gold: str, answer: str) -> bool | None:
        """None where the answer could not be compared in time. Blocks. Raises ReferenceProblem."""
        if len(answer) > LONGEST:
            return None
        with self._free:
            try:
                grader = self._idle.pop()
            except IndexError:
                grader = _Grader(self._limit)
            told = grader.ask({"gold": gold, "answer": answer}, self._limit + 1)
            if told is None:
                grader.end()
                return None
            self._idle.append(grader)
        if "problem" in told:
            raise ReferenceProblem(told["problem"])
        return told["equal"]


class _Grader:
    """One process. Raises RuntimeError where it does not become ready."""

    def __init__(self, limit: int) -> None:
        command = [sys.executable, "-m", "stackrl.runtime.environments.math_grader", str(limit)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._text = b""
        if self._line(START_LIMIT) is None:
            self.end()
            raise RuntimeError(f"`{' '.join(command)}` was not ready within {START_LIMIT:g} s")

    def ask(self, question: dict[str, str], limit: float) -> dict[str, Any] | None:
        """Its answer; None where there is none within ``limit`` seconds, and it is of no more use."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError:
            return None
        line = self._line(limit)
        return None if line is None else json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self, limit: float) -> bytes | None:
        """A short line, which comes in one piece or after the limit of another."""
        assert self._process.stdout is not None
        ready = select.poll()  # unlike select() it takes files of any number
        ready.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._text:
            if not ready.poll(limit * 1000):
                return None
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                return None
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line
