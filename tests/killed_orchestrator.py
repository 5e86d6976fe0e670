"""Lives of an orchestrator with a fake engine, each a process that ends itself with SIGKILL when it reaches a
point of an optimizer step, as no process that cleans up would.

``Lives`` starts ``python killed_orchestrator.py``, which imports everything once and forks a process for each
line [run folder, point, step, file for stderr] that it is given. A point is one of POINTS; `none` runs to the
end, as the orchestrator's own program does. It answers with the process's pid, and then with how that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from small_runs import TOKEN, reversed_badly

from stackrl.runtime import checkpoints
from stackrl.runtime.orchestrator import __main__ as program
from stackrl.runtime.orchestrator import saving
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.recorder import Recorder
from stackrl.runtime.orchestrator.saving import Saving
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchServer

IN_HAND = 0.4
"""Seconds after the offer at which the trainer, which is slower, has a batch and has not applied it."""


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon(*_: object) -> None:
    asyncio.get_running_loop().call_later(IN_HAND, die)


def call(
    owner: Any,
    name: str,
    step_of: Callable[..., int],
    *,
    before: bool = False,
    then: Callable[..., None] = die,
) -> Callable[[int], None]:
    """A point: before or after the call of ``owner.name`` whose arguments say the step."""

    def arm(step: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            here = step_of(*arguments, **options) == step
            if here and before:
                then()
            result = original(*arguments, **options)
            if here and not before and not inspect.isawaitable(result):
                then()
            return result

        @functools.wraps(original)
        async def wrapped_coroutine(*arguments: Any, **options: Any) -> Any:
            result = await original(*arguments, **options)
            if step_of(*arguments, **options) == step:
                then()
            return result

        setattr(owner, name, wrapped_coroutine if inspect.iscoroutinefunction(original) else wrapped)

    return arm


def _index_of_checkpoint(checkpoint: Any, facts: dict[str, Any]) -> int:
    return facts["index"] - 1


POINTS: dict[str, Callable[[int], None]] = {
    "sealed": call(Journal, "seal", lambda journal, place, *more, **options: place.index),
    "taken": call(BatchServer, "offer", lambda server, batches: batches[0].index, then=die_soon),
    "acknowledged": call(Journal, "apply", lambda journal, index: index, before=True),
    "applied": call(Journal, "apply", lambda journal, index: index),
    "told": call(Recorder, "stepped", lambda recorder, record: record["index"]),
    "cutting": call(Journal, "snapshot", lambda journal, path: int(path.parent.parent.name[5:]) - 1),
    "cut": call(Saving, "cut", lambda saving, index: index - 1),
    "declared": call(checkpoints, "write_manifest", _index_of_checkpoint),
    "durable": call(Journal, "make_durable", lambda journal, index: index),
}


class Life:
    """One process of ``Lives``."""

    def __init__(self, answers: Any, stderr: Path) -> None:
        self._answers, self._stderr = answers, stderr
        self._code: int | None = None
        self.pid = int(self._answer(30))

    def wait(self, timeout: float) -> int:
        """The exit code; minus the signal that it was killed with."""
        if self._code is None:
            self._code = int(self._answer(timeout))
        return self._code

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stderr(self) -> str:
        return self._stderr.read_text()

    def _answer(self, timeout: float) -> str:
        if not select.select([self._answers], [], [], timeout)[0]:
            raise TimeoutError(f"the orchestrator lives on after {timeout:.0f} s: {self.stderr()[-2000:]}")
        return self._answers.readline()


class Lives:
    """Use as a context. One life at a time."""

    def __enter__(self) -> Lives:
        folder = Path(__file__).parent
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"STACKRL_TOKEN": TOKEN, "PYTHONPATH": path}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._files = tempfile.TemporaryDirectory(prefix="stackrl-lives-")
        self._process = subprocess.Popen([sys.executable, __file__], bufsize=0, env=environment, **pipes)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._files.cleanup()

    @contextlib.contextmanager
    def living(self, run: RunFolder, point: str = "none", step: int = 0) -> Iterator[Life]:
        """A life, ended at the end."""
        file = Path(self._files.name) / "stderr"
        file.write_text("")
        self._process.stdin.write(json.dumps([str(run.path), point, step, str(file)]).encode() + b"\n")
        life = Life(self._process.stdout, file)
        try:
            yield life
        finally:
            if life.poll() is None:
                life.send_signal(signal.SIGKILL)
                life.wait(30)

    def whole(self, run: RunFolder, point: str = "none", step: int = 0) -> tuple[int, str]:
        """A whole life: its exit code and what it said."""
        with self.living(run, point, step) as life:
            return life.wait(60), life.stderr()

    def killed(self, run: RunFolder, point: str, step: int) -> None:
        code, stderr = self.whole(run, point, step)
        assert code == -signal.SIGKILL, f"not killed when {point} {step}: {stderr[-2000:]}"

    def finished(self, run: RunFolder) -> None:
        code, stderr = self.whole(run)
        assert code == 0, stderr[-2000:]


def _live(run: str, point: str, step: int, stderr: str) -> int:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    if point != "none":
        POINTS[point](step)
    folder = RunFolder(Path(run))
    folder.write("endpoints.json", vars(folder.endpoints()) | {"engines": ["http://fake"]})
    sys.argv[1:] = [run]
    return program.main()


def main() -> None:
    assert saving.checkpoints is checkpoints
    program._connector = lambda *_: lambda url, pool: FakeEngine(reversed_badly, url=url, pool=pool)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = _live(*json.loads(line))
            finally:
                os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
