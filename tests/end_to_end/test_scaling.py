"""A whole run with real engines: down to one, up to two, one killed, one stopped; it goes on meanwhile."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_server import ONE_PROCESS_LESS
from quick_recipe import STACK
from small_runs import lines

from stackrl.runtime.launch.audit import audit
from stackrl.runtime.processes import descendants
from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

LIMIT = 2000.0
"""Seconds; about 300 on two idle cores."""
SILENCE = 20
WARMUP, RL = 60, 5000
"""Steps of the stages; the run is told to end long before the last one."""


@dataclass
class Scaled:
    """A run that is over, and what was seen of it meanwhile."""

    run: RunFolder
    said: list[str] = field(default_factory=list)
    """What `stackrl scale` told."""
    alone: int = 0
    """RL steps that were taken with one engine."""
    members: list[int] = field(default_factory=list)
    """Engines of the run after each change."""

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.run.events) if event["event"] == name]

    @property
    def rl(self) -> list[dict[str, Any]]:
        return [record for record in lines(self.run.metrics) if record["kind"] == "rl"]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    folder = tmp_path_factory.mktemp("scaled")
    task = yaml.safe_load(STACK)
    stack = task["_metadata"]["stack"]
    stack["roles"]["inference"] = {"processes": 2}
    stack["inference"]["arguments"] = ONE_PROCESS_LESS
    stack["algorithm"] |= {"batch_size": 32}
    stack["limits"] = {"silence_seconds": SILENCE, "restarts": 5}
    stack["checkpoint"] = {"every": 50, "keep": 2}
    stack["stages"][0] |= {"steps": WARMUP, "clean_steps": 10}
    stack["stages"][1]["steps"] = RL
    (folder / "quick.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
    environment = os.environ | {
        "STACKRL_HOME": str(folder / "home"),
        TOKEN_VARIABLE: secrets.token_urlsafe(32),
    }
    with open(folder / "output", "w+") as output:
        node = subprocess.Popen(
            [sys.executable, "-m", "stackrl", "node", "quick.yaml"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _lead(node, folder / "home", environment)
        finally:
            node.terminate()
            node.wait(300)
            output.seek(0)
            print(output.read()[-20000:])


def _lead(node: subprocess.Popen[bytes], home: Path, environment: dict[str, str]) -> Scaled:
    """Do to the run what the tests look at, and end it."""
    deadline = time.monotonic() + LIMIT

    def until(condition: Callable[[], Any]) -> None:
        while not condition():
            assert node.poll() is None, "the run ended"
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.1)

    def stackrl(*words: str) -> str:
        command = [sys.executable, "-m", "stackrl", *words]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert told.returncode == 0, told.stderr
        return told.stderr

    until(lambda: list(home.glob("runs/*/run.json")))
    [found] = home.glob("runs/*/run.json")
    seen = Scaled(RunFolder(found.parent))
    run = seen.run

    def steps(more: int) -> None:
        """Wait for that many RL steps from now on."""
        before = len(seen.rl) if run.metrics.exists() else 0
        until(lambda: run.metrics.exists() and len(seen.rl) >= before + more)

    until(lambda: run.events.exists() and seen.events("engines_ready"))
    steps(2)
    seen.said.append(stackrl("scale", run.id, "inference=1"))
    until(lambda: seen.events("engine_left"))
    until(lambda: run.state().roles["engine-1"] == "ended")
    seen.members.append(len(run.endpoints().members))
    before = len(seen.rl)
    steps(3)
    seen.alone = len(seen.rl) - before

    seen.said.append(stackrl("scale", run.id, "inference=2"))
    until(lambda: seen.events("engine_joined"))
    seen.members.append(len(run.endpoints().members))
    steps(3)

    os.kill(_pid(node.pid, "engine-0"), signal.SIGKILL)
    until(lambda: seen.events("engine_back"))
    steps(3)

    os.kill(_pid(node.pid, "engine-1"), signal.SIGSTOP)
    until(lambda: len(seen.events("engine_back")) == 2)
    steps(3)
    seen.said.append(stackrl("down", run.id))
    return seen


def _pid(root: int, process: str) -> int:
    """The first process of a role below ``root``."""
    for pid in sorted(descendants(root)):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"STACKRL_PROCESS={process}".encode() in environment:
            return pid
    raise AssertionError(f"{process} does not run")


def test_the_run_has_one_engine_and_then_two_and_trains_all_the_while(scaled: Scaled) -> None:
    assert scaled.members == [1, 2] and scaled.alone >= 3
    assert "inference 2 → 1 engines; engine-1 leaves" in scaled.said[0]
    assert "inference 1 → 2 engines; engine-1 starts" in scaled.said[1]
    assert [(event["before"], event["after"]) for event in scaled.events("scaled")] == [(2, 1), (1, 2)]
    assert len(scaled.events("engine_left")) == len(scaled.events("engine_joined")) == 1
    assert scaled.run.state().status == "stopped" and scaled.run.state().incarnation == 1


def test_each_loss_is_told_once_with_its_reason(scaled: Scaled) -> None:
    restarted = [(event["process"], event["reason"]) for event in scaled.events("restarted")]
    assert [process for process, _ in restarted] == ["engine-0", "engine-1"]
    assert "was killed by SIGKILL" in restarted[0][1] and "(stopped: SIGSTOP)" in restarted[1][1]
    lost = [event["engine"] for event in scaled.events("engine_lost")]
    assert lost == [event["engine"] for event in scaled.events("engine_back")] and len(set(lost)) == 2


def test_no_token_has_a_wrong_label(scaled: Scaled) -> None:
    """The trainer computes the logprobs of what was sampled with the weights that it holds as those."""
    fresh = [record for record in scaled.rl if record["staleness_max"] == 0]
    assert fresh and all(record["trainer/mismatch_kl"] < 1e-6 for record in fresh)
    assert max(record["staleness_max"] for record in scaled.rl) <= 1


def test_the_books_are_clean(scaled: Scaled) -> None:
    books = audit(scaled.run)
    assert "lost 0, trained twice 0, mixed groups 0" in str(books), str(books)
