"""A whole run with real roles, each of which is killed once: it goes on, learns, and its books are clean."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from engine_server import ONE_PROCESS_LESS
from quick_recipe import GAIN, STACK, WARMUP
from small_runs import lines
from transformers import AutoConfig, AutoModelForCausalLM

from stackrl.runtime.inference.client import Engine, EngineError, Generation
from stackrl.runtime.launch.audit import audit
from stackrl.runtime.processes import descendants
from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.weights import WeightsGone, receive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

LIMIT = 1200.0
"""Seconds; about 160 on two idle cores."""
TOKEN = secrets.token_urlsafe(32)
RL, EVERY = 24, 4
KILLED = {"engine-0": 4, "orchestrator": 10, "trainer-0": 15}
"""Process → the RL step after which it is killed."""
PROBED = 17
"""The RL step from which the engine is compared with the trainer."""
TOLERANCE = 1e-4
PROMPT = [72, 65, 76, 76, 79]


@dataclass
class Survived:
    """A run that is over, and what was seen of it meanwhile."""

    run: RunFolder
    code: int = -1
    output: str = ""
    killed: dict[str, int] = field(default_factory=dict)
    """Process → the pid that was killed."""
    probed: tuple[Version, float] | None = None
    """Version, and the largest difference between logprobs of the engine and of the trainer's weights."""

    @property
    def rl(self) -> list[dict[str, Any]]:
        """The newest record of each RL step."""
        return list(
            {record["step"]: record for record in lines(self.run.metrics) if record["kind"] == "rl"}.values()
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.run.events) if event["event"] == name]


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    folder = tmp_path_factory.mktemp("survived")
    task = yaml.safe_load(STACK)
    task["_metadata"]["stack"]["inference"]["arguments"] = ONE_PROCESS_LESS
    task["_metadata"]["stack"]["checkpoint"] = {"every": EVERY, "keep": 2}
    task["_metadata"]["stack"]["stages"][1]["steps"] = RL
    (folder / "quick.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
    environment = os.environ | {"STACKRL_HOME": str(folder / "home"), TOKEN_VARIABLE: TOKEN}
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
            deadline = time.monotonic() + LIMIT
            seen = Survived(_run(folder / "home", node, deadline))
            for process, step in KILLED.items():
                _wait(lambda step=step: _step(seen.run) >= step, node, deadline)
                pid = _pid(node.pid, process)
                os.kill(pid, signal.SIGKILL)
                seen.killed[process] = pid
            _wait(lambda: _step(seen.run) >= PROBED and seen.run.state().incarnation == 2, node, deadline)
            seen.probed = asyncio.run(_probe(seen.run))
            seen.code = node.wait(max(1.0, deadline - time.monotonic()))
        finally:
            node.terminate()
            node.wait(120)
            output.seek(0)
            said = output.read()
            print(said[-20000:])
    seen.output = said
    yield seen


def _run(home: Path, node: subprocess.Popen[bytes], deadline: float) -> RunFolder:
    _wait(lambda: list(home.glob("runs/*/run.json")), node, deadline)
    [found] = home.glob("runs/*/run.json")
    return RunFolder(found.parent)


def _wait(condition: Callable[[], Any], node: subprocess.Popen[bytes], deadline: float) -> None:
    while not condition():
        assert node.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def _step(run: RunFolder) -> int:
    """RL steps that the newest record tells of."""
    records = lines(run.metrics) if run.metrics.exists() else []
    return records[-1]["step"] + 1 if records and records[-1]["kind"] == "rl" else 0


def _pid(root: int, process: str) -> int:
    """The first process of a role below ``root``."""
    for pid in sorted(descendants(root)):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"STACKRL_PROCESS={process}".encode() in environment:
            return pid
    raise AssertionError(f"{process} does not run")


async def _probe(run: RunFolder) -> tuple[Version, float]:
    """Ask the engine, and recompute its logprobs with the weights that the trainer serves as that version."""
    endpoints = run.endpoints()
    engine = Engine(endpoints.engines[0], TOKEN)
    try:
        for attempt in range(20):
            try:
                generation, version = await _ask(engine, attempt)
                weights = await asyncio.to_thread(
                    lambda version=version: dict(receive(endpoints.weights, version, TOKEN, 30))
                )
            except (EngineError, WeightsGone, AssertionError):
                continue  # an update came between
            logprobs = _recompute(run, weights, generation.tokens)
            differences = [abs(a - b) for a, b in zip(logprobs, generation.logprobs, strict=True)]
            return version, max(differences)
    finally:
        await engine.close()
    raise AssertionError("no reply of one version whose weights were still there")


async def _ask(engine: Engine, attempt: int) -> tuple[Generation, Version]:
    before = await engine.version()
    generation = await engine.generate(
        PROMPT,
        max_tokens=16,
        temperature=1.0,
        seed=attempt,
        salt=f"probe-{attempt}",
        stop_token_ids=[],
        request_id=f"probe-{attempt}",
    )
    assert [span.version for span in generation.spans] == [before]
    return generation, before


@torch.no_grad()
def _recompute(run: RunFolder, weights: dict[str, torch.Tensor], reply: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.model)).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    logits = model(torch.tensor([PROMPT + reply])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[range(len(reply)), reply].tolist()


def test_the_run_finishes_after_every_role_was_killed(survived: Survived) -> None:
    assert survived.code == 0, survived.output[-4000:]
    assert survived.run.state().status == "finished"
    assert survived.killed.keys() == KILLED.keys()
    restarted = {event["process"] for event in survived.events("restarted")}
    assert restarted >= set(KILLED)


def test_only_the_trainers_death_begins_an_incarnation(survived: Survived) -> None:
    assert survived.run.state().incarnation == 2
    assert survived.run.state().attempt == 1


def test_every_step_was_taken(survived: Survived) -> None:
    assert [record["step"] for record in survived.rl] == list(range(RL))


def test_the_reward_still_grows(survived: Survived) -> None:
    rewards = [record["reward"] for record in survived.rl]
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) >= GAIN


def test_the_books_are_clean(survived: Survived) -> None:
    books = audit(survived.run)
    assert books.clean, str(books)
    assert "lost 0, trained twice 0, mixed groups 0" in str(books)
    command = [sys.executable, "-m", "stackrl", "audit", survived.run.id, "-o", "json"]
    environment = os.environ | {"STACKRL_HOME": str(survived.run.path.parents[1])}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["steps"]["all"] == WARMUP + RL


def test_the_engine_has_the_trainers_weights(survived: Survived) -> None:
    version, difference = survived.probed
    assert version.incarnation == 2
    assert difference < TOLERANCE


def test_trainer_and_engine_agree_in_every_step(survived: Survived) -> None:
    """Off-policy by one step at most, before and after each death."""
    assert max(record["staleness_max"] for record in survived.rl) <= 1
    fresh = [record for record in survived.rl if record["staleness_max"] == 0]
    assert fresh and all(record["trainer/mismatch_kl"] < 1e-6 for record in fresh)
