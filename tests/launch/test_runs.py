"""The verbs for runs that exist, on real node programs with small programs as roles."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import FAILS, SERVES, WORKS, fresh_home, gone, make_run, process, start_node, wait_until
from forked import Started

from stackrl.runtime.launch import runs
from stackrl.runtime.run import RunError, RunFolder, State, all_runs, find_run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def started(*processes: dict) -> tuple[RunFolder, Started]:
    run = make_run(*processes)
    node = start_node(run)
    wait_until(lambda: run.state().status == "running")
    return run, node


def test_runs_are_found_by_id_unique_beginning_and_latest() -> None:
    with pytest.raises(RunError, match="no runs"):
        find_run("latest")
    first, second = make_run(), make_run()
    assert find_run("latest").id == second.id
    assert find_run(first.id).id == first.id
    assert find_run(first.id[:-1]).id == first.id
    with pytest.raises(RunError, match="begins several runs"):
        find_run("fake")
    with pytest.raises(RunError, match="no run is called"):
        find_run("other")


@pytest.mark.parametrize("file", ["run.json", "state.json", "stack.json"])
@pytest.mark.parametrize("content", ["", '{"half', "[]"])
def test_a_damaged_run_is_named_and_hides_no_other(
    file: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    well, damaged = make_run(), make_run()
    (damaged.path / file).write_text(content)
    assert {found.id for found in all_runs()} == {well.id, damaged.id}
    assert find_run(well.id).id == well.id
    assert runs.status(None, "text") == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {well.id: "created", damaged.id: "damaged"}
    assert runs.status(None, "json") == 0
    told = {one["id"]: one for one in json.loads(capsys.readouterr().out)}
    assert file in told[damaged.id]["reason"] and told[damaged.id].keys() == told[well.id].keys()
    with pytest.raises(RunError, match=f"{file} is damaged: .*put back a copy"):
        runs.status(damaged.id, "text")


def test_runs_of_other_versions_are_shown_as_far_as_they_are_understood() -> None:
    run = make_run()
    run.write("state.json", run.read("state.json") | {"status": "stopped", "mood": "good"})
    assert run.state() == State(status="stopped")
    run.write("stack.json", run.read("stack.json") | {"mood": "good"})
    assert runs.status(run.id, "text") == 0
    with pytest.raises(RunError, match=r"no stack of this version.*mood.*launch FILE --resume"):
        run.stack()


def test_the_newest_step_is_the_last_whole_line() -> None:
    run = make_run()
    run.metrics.write_text('{"stage": "main", "index": 24, "reward": 0.5}\n{"torn\n')
    assert runs.describe(run)["step"] == 25


@pytest.mark.slow
def test_status_lists_runs_and_tells_one(capsys: pytest.CaptureFixture[str]) -> None:
    failing, node = started(
        process("engine", SERVES), process("trainer", "import time; time.sleep(1)" + ";" + FAILS)
    )
    node.wait(timeout=30)
    failing.metrics.write_text('{"stage": "main", "index": 24, "reward": 0.5}\n{"torn')
    running, _ = started(process("orchestrator", SERVES))
    assert runs.status(None, "text") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:5] for row in rows] == [
        [failing.id, "failed", "main", "25/80", "0.500"],
        [running.id, "running", "0/80", *rows[1][3:5]],
    ]
    assert runs.status(failing.id, "text") == 0
    told = capsys.readouterr().out
    assert "1 ended, trainer-0 failed" in told.splitlines()[1]
    assert "trainer-0  failed" in told and "the disk is full" in told and "engine-0   ended" in told
    assert runs.status("latest", "json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "running"
    assert runs.status(None, "json") == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)] == [failing.id, running.id]


def test_a_run_whose_node_program_is_gone_has_died(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    run.write_state(State("running", attempt=1))
    assert runs.status(run.id, "json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "died"
    assert "--resume" in runs.explain(run)


def test_a_node_program_that_has_locked_but_not_yet_signed_is_waited_for() -> None:
    run = make_run()
    with run.kept():
        (run.path / "lock").write_text("")
        signs = threading.Timer(0.2, (run.path / "lock").write_text, [str(os.getpid())])
        signs.start()
        assert run.keeper() == os.getpid()
        signs.join()
        (run.path / "lock").write_text("")
        with pytest.raises(RunError, match="has not said which it is"):
            run.keeper(limit=0.1)
    assert run.keeper() is None and (run.path / "lock").read_text() == ""


@pytest.mark.slow
def test_down_ends_a_run_and_is_fine_where_there_is_nothing_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "pid"
    tells = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));" + SERVES
    run, node = started(process("engine", tells, str(note)), process("orchestrator", SERVES))
    pid = int(wait_until(lambda: note.exists() and note.read_text()))
    assert runs.down("latest") == 0
    assert gone(pid) and node.wait(timeout=30) == 1
    assert run.state().status == "stopped"
    assert "--resume" in capsys.readouterr().err
    assert runs.down("latest") == 0
    assert "not running (stopped)" in capsys.readouterr().err


@pytest.mark.slow
def test_down_while_a_killed_guard_leaves_the_rest_to_end() -> None:
    run, node = started(process("orchestrator", SERVES))
    os.kill(node.pid, signal.SIGKILL)
    assert runs.down(run.id) == 0
    assert run.keeper() is None


def test_logs_show_the_last_lines_of_every_process_or_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    counts = "print(*range(100), sep=chr(10))"
    run, node = started(process("orchestrator", WORKS), process("trainer", counts), process("engine", SERVES))
    node.wait(timeout=30)
    assert runs.logs("latest", None, False, None, 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        "engine-0     | serving",
        "orchestrator | working",
        "trainer-0    | 98",
        "trainer-0    | 99",
    ]
    assert runs.logs(run.id, "trainer", False, 1, 1) == 0
    assert capsys.readouterr().out == "trainer-0 | 99\n"
    with pytest.raises(RunError, match="there are engine-0, orchestrator, trainer-0"):
        runs.logs(run.id, "judge", False, None, 5)
    with pytest.raises(RunError, match="attempts with logs: 1"):
        runs.logs(run.id, None, False, 7, 5)


@pytest.mark.slow
def test_followed_logs_go_on_until_the_run_ends() -> None:
    ticks = "import time\nfor i in range(12):\n print('tick', i, flush=True)\n time.sleep(0.2)"
    run, _ = started(process("orchestrator", ticks))
    began = time.monotonic()
    command = [sys.executable, "-m", "stackrl", "logs", "-f", "-n", "1", run.id]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0 and time.monotonic() - began < 20
    lines = result.stdout.splitlines()
    assert lines[-1] == "orchestrator | tick 11"
    numbers = [int(line.split()[-1]) for line in lines]
    assert numbers == list(range(numbers[0], 12))


def test_a_folder_that_is_not_a_run_is_left_out(tmp_path: Path) -> None:
    run = make_run()
    (run.path.parent / "half").mkdir()
    assert [found.id for found in all_runs()] == [run.id]


def test_status_says_what_each_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = started(process("orchestrator", SERVES), process("engine", SERVES))
    said = {"doing": "waiting for rollouts of step 3", "since": time.time() - 70, "index": 3}
    (run.heartbeats / "orchestrator.4711").write_text(json.dumps(said))
    (run.heartbeats / "engine-0.4712").write_text("{")
    assert runs.status(run.id, "text") == 0
    told = capsys.readouterr().out
    assert "orchestrator  running: waiting for rollouts of step 3 (for 1:1" in told
    assert "engine-0      running\n" in told and "2 running" in told.splitlines()[1]
    assert runs.status(run.id, "json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described["doing"]["orchestrator"]["text"] == "waiting for rollouts of step 3"
    assert described["age"] < 60 and described["roles"] == {"engine-0": "running", "orchestrator": "running"}


LEAVES_NOISE = """
import faulthandler, sys, time
print("something went wrong here", flush=True)
faulthandler.dump_traceback()
print("error: the tokenizer is missing", file=sys.stderr, flush=True)
print("nanobind: leaked 3 instances!", " - leaked instance 0x7f of type x", sep=chr(10), file=sys.stderr)
print("/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1", file=sys.stderr)
print("  warnings.warn(", file=sys.stderr)
sys.exit(2)
"""


def test_a_failure_shows_the_words_of_the_role_without_noise_and_names_its_stacks() -> None:
    run = make_run(process("orchestrator", LEAVES_NOISE))
    start_node(run).wait(timeout=30)
    log = run.logs(1) / "orchestrator.log"
    assert runs.last_lines(log, 12)[-2:] == ["something went wrong here", "error: the tokenizer is missing"]
    told = runs.explain(run)
    number = 1 + [line.startswith("Current thread") for line in log.read_text().splitlines()].index(True)
    assert f"the stacks of its threads: {log}:{number}\n" in told
    assert "nanobind" not in told and "resource_tracker" not in told and "  File " not in told


@pytest.mark.slow
def test_watching_can_be_left_and_shows_the_end(tmp_path: Path) -> None:
    over = tmp_path / "over"
    works = f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.05)"
    run, _ = started(process("orchestrator", works))
    command = [sys.executable, "-m", "stackrl", "watch", run.id]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    stays, leaves = subprocess.Popen(command, **pipes), subprocess.Popen(command, **pipes)
    assert "is running" in leaves.stdout.readline()
    leaves.send_signal(signal.SIGINT)
    told = leaves.communicate(timeout=20)[1]
    assert leaves.returncode == 0 and "no longer watching; run" in told and "is running" in told
    assert run.keeper() is not None
    over.touch()
    out, told = stays.communicate(timeout=60)
    assert stays.returncode == 0 and "is finished" in out and "finished in" in told
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0 and "finished in" in done.stderr


@pytest.mark.slow
def test_watching_on_a_terminal_survives_another_size() -> None:
    """On a real pseudo-terminal: the screen is drawn anew from the top, as wide as it is now."""
    run, _ = started(process("orchestrator", SERVES))
    driver, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (30, 100))
    others = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    watching = subprocess.Popen(
        [sys.executable, "-m", "stackrl", "watch", run.id],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=others | {"TERM": "xterm"},
    )
    os.close(terminal)
    shown = Terminal(driver)
    wait_until(lambda: "╰" in shown.text())
    assert f"╭─ {run.id}" in shown.text() and len(shown.last_screen()[0]) == 99
    shown.forget()
    termios.tcsetwinsize(driver, (30, 70))
    wait_until(lambda: CLEARED in shown.raw() and "╰" in shown.raw().rpartition(CLEARED)[2])
    assert len(shown.last_screen()[0]) == 69
    watching.send_signal(signal.SIGINT)
    wait_until(lambda: shown.raw() and watching.poll() is not None)
    assert watching.returncode == 0 and run.keeper() is not None
    os.close(driver)


CLEARED = "\x1b[2J"


class Terminal:
    """What was written to a pseudo-terminal since it was last forgotten."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._read = descriptor, b""

    def raw(self) -> str:
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                self._read += os.read(self._descriptor, 1 << 16)
            except OSError:  # nobody has it open any more
                break
        return self._read.decode(errors="replace")

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw())

    def last_screen(self) -> list[str]:
        """Its lines, without the corner that they begin with."""
        return self.text().rpartition("╭")[2].splitlines()

    def forget(self) -> None:
        self.raw()
        self._read = b""
