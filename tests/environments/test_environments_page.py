"""docs/environments.md: its files and commands work as they stand there, and it tells of all there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import yaml

import stacks
from stackrl.runtime.environments import RUNNABLE, make
from stackrl.runtime.environments.base import Answer
from stackrl.runtime.orchestrator.rollout import worth
from stackrl.schemas.environments import Environment
from stackrl.schemas.loader import load

PAGE = (stacks.ROOT / "docs" / "environments.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
MINE = "Your own in five minutes: prompts and a reward"
FILE = re.compile(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
SHORT = [
    "stages.warmup.steps=4",
    "stages.warmup.clean_steps=2",
    "stages.main.steps=2",
    "algorithm.batch_size=16",
]
SHORT += [f"stages.{stage}.optimizer.warmup_steps=0" for stage in ("warmup", "main")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """As the root of the repository is, with the files that the page has one write."""
    shutil.copytree(stacks.ROOT / "stacks", tmp_path / "stacks", symlinks=True)
    for name, text in FILE.findall(PAGE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environments(section: str) -> list[Environment]:
    [text] = YAML.findall(SECTIONS[section])
    return [Environment.model_validate(entry) for entry in yaml.safe_load(text)["environments"]]


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", SECTIONS[MINE], re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def typed(command: str, folder: Path) -> str:
    """What a shell says of a command, with this interpreter's `python` and `stackrl`."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("stackrl", " -m stackrl")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STACKRL_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", command],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_five_minutes_without_the_run(folder):
    said = [typed(command, folder) for command in commands() if "launch" not in command]
    assert said[0] == "1.0\n" and "mine.yaml: fine" in said[-1]
    loaded = load("mine.yaml")
    assert loaded.stack.environments == environments(MINE), "the page shows what the commands make"
    assert loaded.name == "mine" and loaded.task["envs"]["STACK"] == "mine.yaml"


async def test_the_rewards_of_the_page(folder):
    [mine] = environments(MINE)
    it = make(mine)
    task = next(task for seed in range(50) if (task := it.task(Random(seed))).data["answer"] == "Lima")
    assert task.messages[0]["content"] == "capital of Peru?"
    assert worth(await it.reply(task, [Answer("Lima")]), it) == 1.0
    assert worth(await it.reply(task, [Answer("Limo")]), it) == 0.375


async def test_the_environment_of_the_page(folder):
    [riddles] = environments("An environment of your own")
    it = make(riddles)
    task = it.task(Random(0))
    first = await it.reply(task, [Answer("a river")])
    assert not first.done and first.messages[0]["content"] == "no, try again"
    solved = await it.reply(task, [Answer("a river"), Answer(f"a {task.data}")])
    assert solved.done and worth(solved, it) == 0.5
    assert (await it.reply(task, [Answer("x"), Answer("y")])).done, "there are two tries, as the stack says"


def test_the_judge_of_the_page_is_a_valid_one(folder):
    [judged] = environments("A model that judges")
    it = make(judged)
    assert (
        set(judged.rewards) == set(RUNNABLE["dataset"].reward_names(judged.args))
        and it.weights["style"] == 0.2
    )


def test_the_page_tells_of_every_type_its_rewards_and_their_weights():
    rows = [
        line.split("|")[1:-1] for line in SECTIONS["What there is"].splitlines() if line.startswith("| `")
    ]
    told = {name: row[3] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(told) == set(RUNNABLE)
    for type in set(told) - {"dataset", "python", "verifiers"}:
        text = told["arithmetic"] if "as `arithmetic`" in told[type] else told[type]
        weights = {name: float(weight) for name, weight in re.findall(r"`(\w+)` ([\d.]+)", text)}
        assert weights == dict(RUNNABLE[type].weights), type


@pytest.mark.nightly
def test_five_minutes_with_a_short_run(folder):
    for command in commands():
        if "launch" in command:
            command += "".join(f" --set {change}" for change in SHORT)
        said = typed(command, folder)
    assert " finished in " in said
