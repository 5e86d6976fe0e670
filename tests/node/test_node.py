"""The node program on real processes: it names who failed, keeps logs, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import (
    FAILS,
    SERVES,
    STUBBORN_TREE,
    TREE,
    WORKS,
    fresh_home,
    gone,
    make_run,
    process,
    start_node,
    wait_until,
)
from forked import Started

from stackrl.runtime import node
from stackrl.runtime.run import RunError, RunFolder, new_token

ENGINE = process("engine", SERVES)
ORCHESTRATOR = process("orchestrator", WORKS)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def finish(run: RunFolder, **environment: str) -> tuple[int, str]:
    """Run a node to its end: exit code and output."""
    node = start_node(run, **environment)
    output, _ = node.communicate(timeout=60)
    return node.returncode, output


def test_a_run_finishes_when_orchestrator_and_trainer_do() -> None:
    run = make_run(ENGINE, process("trainer", WORKS), ORCHESTRATOR)
    code, output = finish(run)
    state = run.state()
    assert (code, state.status, state.reason) == (0, "finished", ""), output
    assert state.roles == {"engine-0": "ended", "trainer-0": "done", "orchestrator": "done"}
    assert (state.attempt, state.incarnation) == (1, 1)
    assert run.keeper() is None


def test_a_failed_role_ends_the_run_and_is_named_with_its_reason_and_log() -> None:
    run = make_run(ENGINE, process("trainer", FAILS), process("orchestrator", SERVES))
    code, _ = finish(run)
    state = run.state()
    assert (code, state.status) == (1, "failed")
    assert state.reason == "trainer-0 ended with exit code 1: the disk is full"
    assert state.roles == {"engine-0": "ended", "trainer-0": "failed", "orchestrator": "ended"}
    assert (run.logs(1) / "trainer-0.log").read_text() == "so far so good\nerror: the disk is full\n"


def test_a_killed_role_is_the_cause_even_when_another_one_failed_before(tmp_path: Path) -> None:
    note = str(tmp_path / "failing")
    waits = "while not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    killed = f"import os, sys, time\nprint('all is well', flush=True)\n{waits}\nos.kill(os.getpid(), 9)"
    fails = f"open({note!r}, 'w'); {FAILS}"
    run = make_run(
        process("engine", killed, note), process("trainer", fails), process("orchestrator", SERVES)
    )
    finish(run)
    reason = run.state().reason
    assert reason.startswith("engine-0 was killed by SIGKILL") and "trainer-0 failed too" in reason
    assert "all is well" not in reason  # who was killed did not say why


@pytest.mark.slow
def test_an_engine_that_ends_before_the_work_is_done_is_a_failure() -> None:
    run = make_run(process("engine", "pass"), process("orchestrator", SERVES))
    assert finish(run)[0] == 1
    assert run.state().reason.startswith("engine-0 ended with exit code 0")
    assert run.state().roles["engine-0"] == "failed"


@pytest.mark.slow
def test_a_command_that_cannot_be_started_is_a_failure_not_a_traceback() -> None:
    broken = process("trainer", "") | {"command": ["/nonexistent/program"]}
    run = make_run(ENGINE, broken)
    code, output = finish(run)
    assert code == 1 and "Traceback" not in output
    assert "/nonexistent/program" in run.state().reason


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_signal_ends_the_whole_tree(tmp_path: Path, number: int, code: int) -> None:
    run, pids, node = tree(tmp_path, TREE)
    node.send_signal(number)
    node.communicate(timeout=30)
    assert node.returncode == code
    assert gone(*pids)
    assert run.state().status == "stopped" and signal.Signals(number).name in run.state().reason


@pytest.mark.slow
def test_a_second_signal_ends_at_once_what_does_not_mind_the_first(tmp_path: Path) -> None:
    _, pids, node = tree(tmp_path, STUBBORN_TREE)
    node.send_signal(signal.SIGINT)
    time.sleep(1)
    assert node.poll() is None and not gone(pids[0])  # it is given time
    node.send_signal(signal.SIGINT)
    node.communicate(timeout=30)
    assert node.returncode == 130 and gone(*pids)


def test_a_killed_guard_leaves_nothing(tmp_path: Path) -> None:
    run, pids, node = tree(tmp_path, TREE)
    node.kill()
    node.wait()
    wait_until(lambda: gone(*pids))
    wait_until(lambda: run.keeper() is None)
    assert run.state().status == "stopped"
    assert run.state().reason == "stopped: the guard of the node program was killed"


def test_a_killed_supervisor_leaves_nothing_and_the_run_has_failed(tmp_path: Path) -> None:
    run, pids, node = tree(tmp_path, STUBBORN_TREE)
    supervisor = int(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0])
    os.kill(supervisor, signal.SIGKILL)
    node.communicate(timeout=30)
    assert node.returncode == 75 and gone(*pids)  # the declared code for: start me again
    state = run.state()
    assert state.status == "failed" and "SIGKILL" in state.reason and "running" not in state.roles.values()


@pytest.mark.slow
def test_the_tree_of_a_failed_role_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    dying = TREE.replace("time.sleep(600)\n", "sys.exit(3)\n")
    run = make_run(process("engine", dying, str(note)), process("orchestrator", SERVES))
    assert finish(run)[0] == 1
    assert gone(*map(int, note.read_text().split()))


def tree(tmp_path: Path, program: str) -> tuple[RunFolder, list[int], Started]:
    """A running node whose engine forks, with the pids of the engine's tree."""
    note = tmp_path / "pids"
    run = make_run(process("engine", program, str(note)), process("orchestrator", SERVES))
    node = start_node(run)
    wait_until(lambda: note.exists() and note.read_text() and run.state().status == "running")
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 3 and not gone(pids[0]) and not gone(pids[1]) and not gone(pids[2])
    return run, pids, node


@pytest.mark.slow
def test_the_token_reaches_roles_and_nothing_that_others_can_read(tmp_path: Path) -> None:
    note = tmp_path / "token"
    tells = (
        "import os, pathlib, sys, time; token = os.environ['STACKRL_TOKEN'];"
        "print('my token is', token, flush=True); part = pathlib.Path(sys.argv[1] + '.part');"
        "part.write_text(token); part.rename(sys.argv[1]); time.sleep(1)"
    )
    run = make_run(ENGINE, process("orchestrator", tells, str(note)))
    node = start_node(run)
    wait_until(note.exists)
    token = note.read_text()
    assert len(token) >= 32
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert token.encode() not in entry.read_bytes()
        except OSError:
            continue
    node.communicate(timeout=30)
    assert node.returncode == 0
    for path in [run.path, *run.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"others can read {path}"
        assert path.is_dir() or token.encode() not in path.read_bytes(), f"the token is in {path}"
    assert (run.logs(1) / "orchestrator.log").read_text() == "my token is ***\n"


@pytest.mark.slow
def test_a_token_of_the_environment_is_used() -> None:
    run = make_run(
        process("orchestrator", "import os; assert os.environ['STACKRL_TOKEN'] == 'given-by-the-task'")
    )
    assert finish(run, STACKRL_TOKEN="given-by-the-task")[0] == 0


def test_a_token_that_could_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("a", "fifteen-letters", "a token with some spaces", "sixteen-letters!"):
        monkeypatch.setenv("STACKRL_TOKEN", bad)
        with pytest.raises(
            RunError, match=r"must have 16 or more of .*; unset it to let the run make its own"
        ):
            node.main(str(make_run(ORCHESTRATOR).path))
    monkeypatch.setenv("STACKRL_TOKEN", "sixteen-letters.")
    assert new_token() == "sixteen-letters."
    monkeypatch.delenv("STACKRL_TOKEN")
    assert len(new_token()) >= 32


def test_processes_find_their_environment_their_cores_and_different_ports() -> None:
    shows = (
        "import os, sys; print(*(os.environ[n] for n in ('RANK', 'STACKRL_CORES', 'OMP_NUM_THREADS')));"
        "print(sys.stdin.read())"
    )
    ranks = [
        process("trainer", shows, index=i) | {"cores": [2 * i, 2 * i + 1], "environment": {"RANK": str(i)}}
        for i in range(2)
    ]
    run = make_run(*ranks, ENGINE)
    assert finish(run)[0] == 0
    assert (run.logs(1) / "trainer-1.log").read_text() == "1 2,3 2\n\n"  # and standard input is closed
    endpoints = run.endpoints()
    ports = [
        url.rpartition(":")[2] for url in [endpoints.orchestrator, endpoints.weights, endpoints.rendezvous]
    ]
    assert len({*ports, *(url.rpartition(":")[2] for url in endpoints.engines)}) == 4


@pytest.mark.slow
def test_attempts_keep_their_own_logs_and_raise_the_incarnation_before_roles_start() -> None:
    shows = (
        "import sys; from stackrl.runtime.run import RunFolder;"
        "print('incarnation', RunFolder(sys.argv[1]).state().incarnation)"
    )
    run = make_run()
    run.write("plan.json", {"processes": [process("orchestrator", shows, str(run.path))]})
    assert finish(run)[0] == 0
    state = run.state()
    state.status = "failed"
    run.write_state(state)
    assert finish(run)[0] == 0
    assert [(run.logs(n) / "orchestrator.log").read_text() for n in (1, 2)] == [
        "incarnation 1\n",
        "incarnation 2\n",
    ]


@pytest.mark.slow
def test_a_finished_run_is_not_started_again() -> None:
    run = make_run(ORCHESTRATOR)
    assert finish(run)[0] == 0
    code, output = finish(run)
    assert code != 0 and "is finished" in output and run.state().attempt == 1


@pytest.mark.slow
def test_two_nodes_never_work_on_one_run() -> None:
    run = make_run(process("orchestrator", SERVES))
    first = start_node(run)
    wait_until(lambda: run.state().status == "running")
    code, output = finish(run)
    assert code != 0 and "already running" in output
    assert run.keeper() == first.pid
    first.terminate()
    first.communicate(timeout=30)


@pytest.mark.slow
def test_the_first_weights_are_prepared_once_and_their_failure_is_named(tmp_path: Path) -> None:
    run = make_run(ORCHESTRATOR, prepared=False)
    fails = f"[{sys.executable!r}, '-c', {FAILS!r}]"
    program = (
        "import sys; from stackrl.runtime import node;"
        f"sys.exit(node.main({str(run.path)!r}, prepare={fails}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert run.state().reason == "prepare ended with exit code 1: the disk is full"
    assert "orchestrator" not in run.state().roles


@pytest.mark.slow
def test_output_that_a_grandchild_holds_open_does_not_keep_the_run(tmp_path: Path) -> None:
    leaves = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    run = make_run(process("orchestrator", leaves))
    began = time.monotonic()
    assert finish(run)[0] == 0
    assert time.monotonic() - began < 10


def test_a_traceback_is_told_by_its_cause_not_by_what_follows() -> None:
    tells = (
        "import sys; print('WARNING ValueError: odd'); print('(worker) ERROR RuntimeError: no memory');"
        "print('EngineDeadError: see above'); print('bye'); sys.exit(1)"
    )
    run = make_run(process("engine", tells), process("orchestrator", SERVES))
    finish(run)
    assert run.state().reason == "engine-0 ended with exit code 1: RuntimeError: no memory"


@pytest.mark.slow
def test_a_fault_of_the_node_program_ends_the_run_with_its_traceback_in_the_logs() -> None:
    run = make_run(ENGINE)
    program = (
        "import sys; from stackrl.runtime import node;"
        f"node.Roles.start = lambda roles: 1 / 0; sys.exit(node.main({str(run.path)!r}))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 1
    assert "ZeroDivisionError" in run.state().reason and run.state().status == "failed"
    assert "Traceback" in (run.logs(1) / "node.log").read_text()
