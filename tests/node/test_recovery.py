"""Roles that die, stop or hang are started again, with small programs as roles."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import BEATS, FAILS, SERVES, TREE, fresh_home, gone, make_run, process, start_node, wait_until

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.runs import explain
from stackrl.runtime.run import RunFolder

pytestmark = pytest.mark.slow

LIVES = """
import json, os, pathlib, sys, time
from stackrl.runtime.run import RunFolder
run, name = RunFolder(sys.argv[1]), os.environ["STACKRL_PROCESS"]
book = run.path / f"lives-{name}"
life = len(book.read_text().splitlines()) + 1 if book.exists() else 1
endpoints = vars(run.endpoints())
facts = {"pid": os.getpid(), "incarnation": run.state().incarnation, **endpoints}
facts["restore"] = str(run.restore() or "")
facts["token"] = os.environ["STACKRL_TOKEN"]
with open(book, "a") as file:
    file.write(json.dumps(facts) + "\\n")
print("life", life, flush=True)

def others(*wanted):
    while not all(len(p.read_text().splitlines()) >= n if p.exists() else False
                  for p, n in ((run.path / f"lives-{o}", n) for o, n in wanted)):
        time.sleep(0.05)
"""
"""The beginning of a role that writes down each of its lives."""
ENDLESS = LIVES + "time.sleep(600)"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def role(name: str, program: str, index: int = 0) -> dict[str, Any]:
    return process(name, program, "RUN", index=index)


def lives(run: RunFolder, name: str) -> list[dict[str, Any]]:
    book = run.path / f"lives-{name}"
    return [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text().splitlines()] if run.events.exists() else []
    return [event for event in found if event["event"] == kind]


def finish(run: RunFolder) -> tuple[int, str]:
    node = start_node(run)
    output, _ = node.communicate(timeout=90)
    return node.returncode, output


def all_alive(run: RunFolder, *names: str) -> dict[str, int]:
    """Pids of the processes in their first life."""
    wait_until(lambda: all(lives(run, name) for name in names))
    return {name: lives(run, name)[0]["pid"] for name in names}


def test_an_engine_is_started_again_alone_at_its_port() -> None:
    run = make_run(
        role("engine", ENDLESS),
        role("trainer", LIVES + "others(('engine-0', 2))"),
        role("orchestrator", LIVES + "others(('engine-0', 2))"),
        restarts=5,
    )
    node = start_node(run)
    os.kill(all_alive(run, "engine-0", "trainer-0", "orchestrator")["engine-0"], signal.SIGKILL)
    output, _ = node.communicate(timeout=60)
    assert node.returncode == 0, output
    first, second = lives(run, "engine-0")
    assert second["engines"] == first["engines"] and second["token"] == first["token"]
    assert len(lives(run, "trainer-0")) == len(lives(run, "orchestrator")) == 1
    assert run.state().incarnation == 1
    log = (run.logs(1) / "engine-0.log").read_text().splitlines()
    assert (log[0], log[2]) == ("life 1", "life 2")
    assert log[1].startswith("--- started again (1) at ") and "was killed by SIGKILL" in log[1]
    [event] = events(run, "restarted")
    assert (event["process"], event["count"], event["incarnation"]) == ("engine-0", 1, 1)
    assert "was killed by SIGKILL" in event["reason"] and time.time() - event["time"] < 60


def test_a_rank_takes_all_workers_along_to_the_newest_good_checkpoint_and_new_ports() -> None:
    work = LIVES + "others(('trainer-0', 2), ('trainer-1', 2), ('orchestrator', 2))"
    run = make_run(
        role("engine", ENDLESS),
        role("trainer", work),
        role("trainer", work, index=1),
        role("orchestrator", work),
        restarts=5,
    )
    node = start_node(run)
    pids = all_alive(run, "engine-0", "trainer-0", "trainer-1", "orchestrator")
    saved = [checkpoints.folder(run.path / "checkpoints", index) for index in (3, 6)]
    for checkpoint in saved:
        (checkpoint / "trainer").mkdir(parents=True)
        (checkpoint / "trainer" / "weights").write_text("these are the weights")
        checkpoints.write_manifest(checkpoint, {"incarnation": 1})
    (saved[1] / "trainer" / "weights").write_text("these Are the weights")
    os.kill(pids["trainer-1"], signal.SIGKILL)
    output, _ = node.communicate(timeout=60)
    assert node.returncode == 0, output
    assert gone(*pids.values())
    for name in ("trainer-0", "trainer-1", "orchestrator"):
        first, second = lives(run, name)
        assert (first["incarnation"], second["incarnation"]) == (1, 2)
        assert (first["restore"], second["restore"]) == ("", str(saved[0]))
        assert second["engines"] == first["engines"] and second["token"] == first["token"]
        for port in ("orchestrator", "weights", "rendezvous"):
            assert second[port] != first[port]
    assert len(lives(run, "engine-0")) == 1
    assert (run.state().attempt, run.state().incarnation) == (1, 2)
    log = (run.logs(1) / "node.log").read_text()
    assert f"passing over a checkpoint: {saved[1]}/trainer/weights is damaged" in log
    assert f"incarnation 2 starts from {saved[0]}" in log
    assert {event["process"] for event in events(run, "restarted")} == {
        "trainer-0",
        "trainer-1",
        "orchestrator",
    }


def test_the_orchestrator_goes_alone_once_in_the_same_incarnation_and_then_with_the_trainer() -> None:
    run = make_run(
        role("engine", ENDLESS),
        role("trainer", LIVES + "others(('trainer-0', 2))"),
        role("orchestrator", LIVES + "life < 3 and sys.exit('error: lost'); others(('trainer-0', 2))"),
        restarts=5,
    )
    code, output = finish(run)
    assert code == 0, output
    first, second, third = lives(run, "orchestrator")
    assert [life["incarnation"] for life in (first, second, third)] == [1, 1, 2]
    assert second["orchestrator"] == first["orchestrator"] != third["orchestrator"]
    assert [life["incarnation"] for life in lives(run, "trainer-0")] == [1, 2]


def test_restarts_end_with_who_failed_how_often_and_its_last_words() -> None:
    run = make_run(
        role("engine", SERVES), process("trainer", FAILS), role("orchestrator", SERVES), restarts=1
    )
    code, _ = finish(run)
    state = run.state()
    assert (code, state.status, state.incarnation) == (1, "failed", 2)
    assert state.reason == (
        "trainer-0 ended with exit code 1: the disk is full "
        "(2 failures in a row, with no optimizer step in between)"
    )
    assert state.roles == {"engine-0": "ended", "trainer-0": "failed", "orchestrator": "ended"}
    assert "so far so good" in explain(run)


@pytest.mark.parametrize("name", ["engine", "trainer", "orchestrator"])
def test_bad_input_is_not_tried_again(name: str) -> None:
    bad = LIVES + "print('error: no such flag', file=sys.stderr); sys.exit(2)"
    programs = {"engine": ENDLESS, "trainer": ENDLESS, "orchestrator": ENDLESS} | {name: bad}
    run = make_run(*(role(*item) for item in programs.items()), restarts=5)
    code, _ = finish(run)
    assert code == 1 and not events(run, "restarted")
    assert "ended with exit code 2: no such flag" in run.state().reason


def test_all_that_a_role_started_is_gone_before_it_is_started_again(tmp_path: Path) -> None:
    note = str(tmp_path / "pids")
    dies = TREE.replace("time.sleep(600)\n", "os.kill(os.getpid(), 9)\n")
    program = f"""
import os, pathlib, sys
note = pathlib.Path({note!r})
if note.exists():
    left = [pid for pid in note.read_text().split() if os.path.exists("/proc/" + pid)]
    pathlib.Path(str(note) + "-left").write_text(" ".join(left))
    import time
    time.sleep(600)
sys.argv = ["", str(note)]
exec({dies!r})
"""
    left = Path(note + "-left")
    wait = f"import os, time\nwhile not os.path.exists({str(left)!r}): time.sleep(0.05)"
    run = make_run(role("engine", program), role("orchestrator", wait), restarts=5)
    code, output = finish(run)
    assert code == 0, output
    assert len(Path(note).read_text().split()) == 3 and left.read_text() == ""


@pytest.mark.parametrize(
    "victim",
    [
        "trainer-0",
        pytest.param("engine-0", marks=pytest.mark.nightly),
        pytest.param("orchestrator", marks=pytest.mark.nightly),
    ],
)
def test_a_stopped_role_is_ended_and_started_again(victim: str) -> None:
    work = BEATS + LIVES + f"others(({victim!r}, 2))"
    run = make_run(
        role("engine", BEATS + ENDLESS),
        role("trainer", work),
        role("orchestrator", work),
        restarts=5,
        silence_seconds=5.0,
    )
    node = start_node(run)
    os.kill(all_alive(run, "engine-0", "trainer-0", "orchestrator")[victim], signal.SIGSTOP)
    stopped = time.time()
    output, _ = node.communicate(timeout=60)
    assert node.returncode == 0, output
    assert min(event["time"] for event in events(run, "restarted")) - stopped < 5 + 20
    restarted = {event["process"]: event["reason"] for event in events(run, "restarted")}
    assert re.fullmatch(rf"{victim} was silent for \d+ s \(stopped: SIGSTOP\)", restarted[victim])
    alone = victim != "trainer-0"
    assert len(restarted) == (1 if alone else 2) and run.state().incarnation == (1 if alone else 2)


def test_a_role_that_hangs_leaves_its_stacks_and_is_named() -> None:
    hangs = (
        BEATS
        + "import ctypes\ndef stuck():\n  while True: ctypes.PyDLL(None).sleep(600)\ntime.sleep(1)\nstuck()"
    )
    run = make_run(
        process("engine", SERVES),
        process("trainer", hangs),
        process("orchestrator", SERVES),
        silence_seconds=5.0,
    )
    code, _ = finish(run)
    assert code == 1 and run.state().roles["trainer-0"] == "failed"
    assert run.state().reason.startswith("trainer-0 was silent for 5 s (it hangs; stacks in its log)")
    log = (run.logs(1) / "trainer-0.log").read_text()
    assert "in stuck" in log and "in _beat" in log


def test_a_run_that_gets_nowhere_ends_and_tells_what_the_orchestrator_waited_for() -> None:
    waits = BEATS + (
        "for n in range(20): heartbeat.note('step', index=1, finished=n, checkpoint=0); time.sleep(0.2)\n"
        "heartbeat.note('waiting for engine http://127.0.0.1:7'); time.sleep(600)"
    )
    run = make_run(
        process("engine", BEATS + "time.sleep(600)"), process("orchestrator", waits), idle_minutes=0.05
    )
    began = time.monotonic()
    code, _ = finish(run)
    assert code == 1 and run.state().status == "failed"
    assert time.monotonic() - began > 4 + 3  # the first 4 s there was progress
    reason = run.state().reason
    assert "for 0.05 min (limits.idle_minutes)" in reason
    assert "the orchestrator was waiting for engine http://127.0.0.1:7 for 0." in reason
    assert "Current thread" in (run.logs(1) / "engine-0.log").read_text()
