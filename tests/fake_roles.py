"""Runs whose roles are small Python programs, for tests of what starts, watches and ends processes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Started, Starter

from stackrl.runtime.processes import send
from stackrl.runtime.run import RunFolder, all_runs, create_run
from stackrl.schemas.stack import Stack

HERE = Path(__file__).parent
WORKS = "import time; print('working', flush=True); time.sleep(0.5)"
SERVES = "import time; print('serving', flush=True); time.sleep(600)"
FAILS = "import sys; print('so far so good'); sys.exit('error: the disk is full')"
TREE = '''
import os, pathlib, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
same_group = subprocess.Popen([sys.executable, "-c", child])
# a daemon: its own session, its parent gone at once
daemon = f"""import subprocess, sys
command = [sys.executable, "-c", {child!r}]
null = subprocess.DEVNULL
print(subprocess.Popen(command, start_new_session=True, stdout=null, stderr=null).pid)"""
orphan = subprocess.run([sys.executable, "-c", daemon], capture_output=True, text=True).stdout.strip()
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {same_group.pid} {orphan}")
time.sleep(600)
'''
"""Writes its own pid, a child's and a daemon's to the file it is given. The last two do not mind SIGTERM."""
STUBBORN_TREE = TREE.replace(
    "import os,", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import os,", 1
)
"""Nor does the first of these."""

STACK: dict[str, Any] = {
    "version": 1,
    "model": {
        "init": "random",
        "architecture": "qwen3",
        "config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    },
    "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
    "environments": [{"name": "reverse", "type": "reverse_text"}],
    "stages": [
        {"name": "warmup", "type": "supervised", "steps": 20},
        {"name": "main", "type": "rl", "steps": 60},
    ],
}


BEATS = """
import json, os, pathlib, signal, sys, time
from stackrl.runtime import heartbeat
heartbeat.start()
"""
"""The beginning of a role that gives signs of life."""


@contextmanager
def fresh_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A STACKRL_HOME of this test, whose runs are ended with it."""
    monkeypatch.setenv("STACKRL_HOME", str(folder / "home"))
    monkeypatch.delenv("STACKRL_TOKEN", raising=False)
    yield
    for run in all_runs():
        if (pid := run.keeper()) is not None:
            send(pid, signal.SIGTERM)
            send(pid, signal.SIGTERM)  # at once
    wait_until(lambda: all(run.keeper() is None for run in all_runs()), limit=60)


def stack(**changes: Any) -> Stack:
    return Stack.model_validate(STACK | changes)


def process(role: str, program: str, *arguments: str, index: int = 0) -> dict[str, Any]:
    """A process of a plan, as plan.json holds it."""
    command = ["-c", program, *arguments]
    return {"role": role, "index": index, "node": 0, "pool": "trainer", "command": command, "cores": [0]}


def make_run(*processes: dict[str, Any], prepared: bool = True, **limits: Any) -> RunFolder:
    """A run in the home of this test whose plan has these processes. Its ``limits`` allow no restart, unless
    they say so."""
    source = Path(os.environ["STACKRL_HOME"]) / "stack.yaml"
    source.parent.mkdir(exist_ok=True)
    source.write_text("name: fake\n")
    run = create_run(
        "fake", source, "hash", stack(limits={"restarts": 0} | limits), {"processes": list(processes)}
    )
    if prepared:
        run.model.mkdir(mode=0o700)
    return run


@cache
def _starter() -> Starter:
    return Starter(HERE, "stackrl.runtime.node")


def start_node(run: RunFolder, *, report: bool = False, **environment: str) -> Started:
    """The node program of a run, in a process of its own. ``report``: whether it writes one at the end."""
    program = [str(HERE / "node_program.py"), str(run.path), *(["report"] if report else [])]
    return _starter().start(program, {**os.environ, **environment}, tempfile.TemporaryFile("w+"))


def wait_until(condition: Callable[[], Any], limit: float = 60.0) -> Any:
    """What the condition finds at last. A file that nobody has written yet is a reason to wait."""
    deadline = time.monotonic() + limit
    while not (found := _found(condition)):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def _found(condition: Callable[[], Any]) -> Any:
    try:
        return condition()
    except FileNotFoundError:
        return None


def gone(*pids: int) -> bool:
    return not any(send(pid, 0) and not _zombie(pid) for pid in pids)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def task_file(folder: Path, *, num_nodes: int = 1, **changes: Any) -> Path:
    """A stack file with the stack of these tests."""
    file = folder / "fake.yaml"
    task = {
        "name": "fake",
        "num_nodes": num_nodes,
        "workdir": ".",
        "envs": {"STACK": file.name},
        "run": 'stackrl node "$STACK"',
        "_metadata": {"stack": STACK | changes},
    }
    file.write_text(yaml.safe_dump(task))
    return file
