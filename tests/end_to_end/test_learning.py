"""A whole run with real roles, started as SkyPilot starts it: it learns, and leaves nothing running."""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from quick_recipe import GAIN, RL, STACK, WARMUP
from skypilot_variables import ONE_NODE
from small_runs import lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from stackrl.runtime.environments.reverse_text import similarity
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.processes import descendants
from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder
from stackrl.schemas.loader import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT = 800.0
"""Seconds; about 80 on two idle cores."""
TOKEN = secrets.token_urlsafe(32)
TASK = yaml.safe_load(STACK)

ALWAYS = """
    time kind stage stage_step stage_steps index step
    seconds_rollouts_wait seconds_step engine_busy tokens_per_second
    trainer/loss trainer/gradient_norm trainer/learning_rate trainer/entropy trainer/skipped
    trainer/tokens_trained trainer/tokens_packed
    trainer/seconds_step trainer/seconds_wait trainer/seconds_publish
"""
IN_RL = """
    reward reward_std solved group_signal reward/reverse length/reverse
    staleness_mean staleness_max rollouts turns tokens_generated prefix_breaks dropped
    trainer/mismatch_kl trainer/ratio_max trainer/capped
"""
"""Keys in metrics.jsonl."""


class Watch:
    """The processes of a tree as anyone on the machine sees them, looked at again and again."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.commands: dict[tuple[int, str], str] = {}
        """Command lines by pid and time of start, which together are never used twice."""

    def look(self) -> None:
        for pid in [self._root, *descendants(self._root)]:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                started = _life(pid)[1]
            except OSError:  # ended meanwhile
                continue
            if any(words):  # one that is just ending has none any more
                self.commands[pid, started] = b" ".join(words).decode(errors="replace")

    def left(self) -> list[str]:
        """Command lines of those that still run."""
        return [command for (pid, start), command in self.commands.items() if _runs(pid, start)]


def _life(pid: int) -> tuple[str, str]:
    """State and time of start of a process. Raises OSError where it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _runs(pid: int, start: str) -> bool:
    try:
        state, started = _life(pid)
    except OSError:
        return False
    return started == start and state not in "ZX"


@dataclass
class Learned:
    """A run that is over."""

    run: RunFolder
    code: int
    output: str
    watch: Watch
    environment: dict[str, str]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.run.metrics)

    @property
    def rl(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record["kind"] == "rl"]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.run.events) if event["event"] == name]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learned]:
    folder = tmp_path_factory.mktemp("learned")
    (folder / "quick.yaml").write_text(STACK)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = folder / "home"
    environment = os.environ | ONE_NODE | TASK["envs"] | {"PATH": path, "STACKRL_HOME": str(home)}
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", TASK["run"]],
            cwd=folder,
            env=environment | {TOKEN_VARIABLE: TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        watch = Watch(process.pid)
        try:
            _accompany(process, watch)
        finally:
            process.terminate()
            process.wait(120)
        output.seek(0)
        said = output.read()
    found = list(home.glob("runs/*/run.json"))
    assert len(found) == 1, said[-4000:]
    yield Learned(RunFolder(found[0].parent), process.returncode, said, watch, environment)


def _accompany(process: subprocess.Popen[bytes], watch: Watch) -> None:
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        watch.look()
        time.sleep(0.3)


def test_the_run_finishes(learned: Learned) -> None:
    assert learned.code == 0, learned.output[-4000:]
    command = [sys.executable, "-m", "stackrl", "status", "-o", "json"]
    told = subprocess.run(command, env=learned.environment, capture_output=True, text=True, timeout=60)
    [status] = json.loads(told.stdout)
    expected = {
        "id": learned.run.id,
        "status": "finished",
        "stage": "main",
        "step": WARMUP + RL,
        "reason": "",
    }
    assert {name: status[name] for name in expected} == expected
    roles = {"prepare": "done", "engine-0": "ended", "trainer-0": "done", "orchestrator": "done"}
    assert status["roles"] == roles
    assert f"node         | run {learned.run.id} finished" in learned.output


def test_the_reward_grows(learned: Learned) -> None:
    rewards = [record["reward"] for record in learned.rl]
    assert len(rewards) == RL
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) >= GAIN
    before, after = learned.events("evaluated")
    assert (before["when"], after["when"]) == ("before", "after")
    assert after["reward"] - before["reward"] >= GAIN
    assert before["failed"] == after["failed"] == 0


def test_every_step_is_written_down_with_its_keys(learned: Learned) -> None:
    assert [record["index"] for record in learned.metrics] == list(range(WARMUP + RL))
    assert [record["step"] for record in learned.rl] == list(range(RL))
    for record in learned.metrics:
        assert record.keys() >= set(ALWAYS.split())
        assert record["kind"] == "supervised" or record.keys() >= set(IN_RL.split())
        numbers = [value for value in record.values() if not isinstance(value, str)]
        assert all(value is not None and math.isfinite(value) for value in numbers)


def test_trainer_and_engine_agree(learned: Learned) -> None:
    """The first step trains what its own weights sampled; later ones what is one step older at most."""
    first = learned.rl[0]
    assert first["staleness_max"] == 0
    assert first["trainer/mismatch_kl"] < 1e-6 and first["trainer/ratio_max"] < 1.001
    assert max(record["staleness_max"] for record in learned.rl) == 1
    for record in learned.rl:
        assert record["trainer/tokens_trained"] == record["tokens_generated"]
        assert record["prefix_breaks"] == record["dropped"] == 0
    versions = [event["version"] for event in learned.events("weights_updated")]
    assert versions[0] == "1.0" and versions[-1] == f"1.{RL}"


@torch.no_grad()
def test_the_final_model_answers_as_the_engine_did(learned: Learned) -> None:
    """On the evaluation's prompts, in transformers, with nothing of ours but the folder."""
    model, report = AutoModelForCausalLM.from_pretrained(learned.run.final, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(learned.run.final, padding_side="left")
    evaluated = learned.events("evaluated")[-1]
    stack = learned.run.stack()
    mix = Mix(stack.environments, Seeds(stack.seed).branch("evaluation"))
    tasks = [mix.draw(number).task for number in range(evaluated["prompts"])]
    prompts = tokenizer.apply_chat_template(
        [list(task.messages) for task in tasks],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    replies = model.generate(**prompts, max_new_tokens=stack.sampling.max_tokens, do_sample=False)
    answers = tokenizer.batch_decode(replies[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [similarity(answer, task.data) for answer, task in zip(answers, tasks, strict=True)]
    assert fmean(rewards) == pytest.approx(evaluated["greedy_reward"], abs=0.01)


def test_nothing_is_left_running(learned: Learned) -> None:
    seen = list(learned.watch.commands.values())
    for role in ("stackrl.runtime.trainer ", "stackrl.runtime.orchestrator ", "vllm.entrypoints"):
        assert any(role in command and str(learned.run.path) in command for command in seen), role
    assert learned.watch.left() == []
    assert learned.run.keeper() is None


def test_the_token_is_nowhere_to_be_read(learned: Learned) -> None:
    assert not any(TOKEN in command for command in learned.watch.commands.values())
    assert TOKEN not in learned.output
    files = [file for file in learned.run.path.parent.parent.rglob("*") if file.is_file()]
    assert {"metrics.jsonl", "trainer-0.log", "engine-0.log", "endpoints.json"} <= {
        file.name for file in files
    }
    assert [file for file in files if TOKEN.encode() in file.read_bytes()] == []


def test_the_run_is_the_stack_of_the_file(learned: Learned) -> None:
    assert (learned.run.path / "source.yaml").read_text() == STACK
    expected = load(Path(learned.run.read("run.json")["source"])).stack
    assert learned.run.stack() == expected.model_copy(update={"device": "cpu"})
