"""Signs of life: what processes write, and what a listener makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_roles import wait_until

from stackrl.runtime import heartbeat
from stackrl.runtime.heartbeat import Listener

BEATS = "import os, sys, time; from stackrl.runtime import heartbeat; heartbeat.start(); "


@contextmanager
def process(folder: Path, program: str = "time.sleep(600)", name: str = "trainer-0") -> Iterator[int]:
    """The pid of a process that beats, its stderr in ``folder``/log."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "STACKRL_HEARTBEATS": str(folder), "STACKRL_PROCESS": name}
    with open(folder.parent / "log", "ab") as log:
        started = subprocess.Popen([sys.executable, "-c", BEATS + program], env=environment, stderr=log)
    try:
        wait_until(lambda: list(folder.glob(f"{name}.*")))
        yield started.pid
    finally:
        started.kill()
        started.wait()


def test_a_process_says_what_it_does_and_keeps_what_it_said(tmp_path: Path) -> None:
    says = "heartbeat.note('step 1', index=1, finished=7); heartbeat.note('step 1', index=2); time.sleep(600)"
    with process(tmp_path / "beats", says) as pid:
        listener = Listener(tmp_path / "beats", 5)
        said = wait_until(lambda: (found := listener.says("trainer-0", pid)).get("index") == 2 and found)
        assert (said["doing"], said["finished"]) == ("step 1", 7) and time.time() - said["since"] < 20
        assert (tmp_path / "beats" / f"trainer-0.{pid}").stat().st_mode & 0o777 == 0o600
    assert listener.says("trainer-0", 1) == {} and listener.says("engine-0", pid) == {}


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.HEARTBEATS_VARIABLE, raising=False)
    heartbeat.start("trainer-0")
    heartbeat.note("nothing")
    assert heartbeat._heart is None


def listen(listener: Listener, pids: dict[str, int], seconds: float) -> dict[str, str]:
    """Look often for a while, until somebody is silent."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := listener.silent(pids):
            return found
        time.sleep(0.1)
    return {}


@pytest.mark.slow
def test_a_stopped_process_is_silent_and_a_living_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "beats"
    with process(folder) as stopped, process(folder, name="trainer-1") as living:
        pids = {"trainer-0": stopped, "trainer-1": living}
        listener = Listener(folder, 2.5)
        assert listen(listener, pids, 4) == {}
        os.kill(stopped, signal.SIGSTOP)
        assert listen(listener, pids, 8) == {"trainer-0": "was silent for 3 s (stopped: SIGSTOP)"}


@pytest.mark.slow
def test_a_process_that_hangs_with_the_interpreter_is_silent_and_still_tells_its_stacks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "beats"
    # PyDLL keeps the lock of the interpreter: no other thread of the process gets it
    hangs = "import ctypes; time.sleep(1); ctypes.PyDLL(None).sleep(600)"
    with process(folder, hangs) as pid:
        listener = Listener(folder, 2)
        assert listen(listener, {"trainer-0": pid}, 10) == {
            "trainer-0": "was silent for 2 s (it hangs; stacks in its log)"
        }
        assert listener.beating("trainer-0", pid) == [pid]
        os.kill(pid, heartbeat.DUMP_SIGNAL)
        wait_until(lambda: "heartbeat.py" in (log := (tmp_path / "log").read_text()) and '"<string>"' in log)
        os.kill(pid, 0)  # it goes on hanging: it was not killed by that


@pytest.mark.slow
def test_one_that_is_stopped_before_its_first_beat_is_silent_and_one_that_is_slow_is_not(
    tmp_path: Path,
) -> None:
    slow = subprocess.Popen(["sleep", "600"])
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        pids = {"engine-0": slow.pid, "engine-1": stopped.pid}
        listener = Listener(tmp_path, 1)
        assert set(listen(listener, pids, 5)) == {"engine-1"}
        assert listener.beating("engine-1", stopped.pid) == []  # SIGUSR1 would kill it
    finally:
        for started in (slow, stopped):
            started.kill()
            started.wait()


def test_a_listener_that_was_stopped_itself_gives_new_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    (tmp_path / f"trainer-0.{os.getpid()}").write_text("{}")
    listener, pids = Listener(tmp_path, 10), {"trainer-0": os.getpid()}

    def look(seconds: int) -> bool:
        found = False
        for _ in range(seconds):
            now[0] += 1
            found = bool(listener.silent(pids))
        return found

    assert not look(11) and look(1)  # the control: silence is noticed
    now[0] += 300
    assert not look(11) and look(1)


@pytest.mark.slow
def test_one_that_takes_long_to_leave_is_not_silent(tmp_path: Path) -> None:
    """It has no threads left that could beat."""
    leaves = "class Memory:\n    def __del__(self): time.sleep(600)\nkept = Memory()"
    program = f"exec({leaves!r})"
    with process(tmp_path / "beats", program) as pid:
        listener = Listener(tmp_path / "beats", 1)
        wait_until(lambda: not list((tmp_path / "beats").glob("trainer-0.*")))
        assert listen(listener, {"trainer-0": pid}, 2) == {}
        assert Path(f"/proc/{pid}").exists()


def test_the_file_of_a_process_that_ended_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    file = tmp_path / f"engine-0.{child.pid}"
    file.write_text("{}")
    listener, now = Listener(tmp_path, 3), [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    for _ in range(8):
        now[0] += 1
        assert listener.silent({"engine-0": os.getpid()}) == {}
    assert not file.exists()
    assert listener.beating("engine-0", os.getpid()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("follow", "files"), [("True", 2), ("False", 1)])
def test_forked_children_beat_where_that_is_asked_for(tmp_path: Path, follow: str, files: int) -> None:
    folder = tmp_path / "beats"
    folder.mkdir()
    program = (
        "import os, sys, time; from stackrl.runtime import heartbeat;"
        f"heartbeat.start('engine-0', follow_forks={follow});"
        "child = os.fork(); heartbeat.note('child' if child == 0 else 'parent');"
        "child and (os.wait(), print('alone', flush=True)); sys.stdin.readline()"
    )
    environment = {**os.environ, "STACKRL_HEARTBEATS": str(folder)}

    def said() -> set[str]:
        return {json.loads(file.read_text())["doing"] for file in folder.glob("engine-0.*")}

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as parent:
        wait_until(lambda: said() == ({"child", "parent"} if files == 2 else {"parent"}))
        parent.stdin.write(b"the child leaves\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"alone\n"
        assert said() == {"parent"}
        parent.stdin.close()
    assert said() == set() and parent.returncode == 0


def test_a_full_disk_does_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    heart = object.__new__(heartbeat._Heart)
    heart._file = tmp_path / "trainer-0.7"
    monkeypatch.setattr("builtins.open", full)
    assert heart._write({"doing": "x"}) is False
    heart._touch()
    before = heart._file.stat().st_mtime_ns
    time.sleep(0.02)
    heart._touch()
    assert heart._file.stat().st_mtime_ns > before
