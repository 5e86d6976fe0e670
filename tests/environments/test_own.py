"""Environments of one's own, by path and by the entry point of an installed package."""

from __future__ import annotations

import sys
from random import Random

import pytest

from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.base import AgentEnvironment, Answer
from stackrl.runtime.orchestrator.rollout import worth
from stackrl.schemas.environments import Environment

OWN = '''
from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Task, TurnEnvironment, user

class Echo(TurnEnvironment):
    """Say it again."""

    schema = {
        "type": "object",
        "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
        "additionalProperties": False,
    }
    weights = {"same": 1.0, "long": 0.0}

    def __init__(self, words=("a", "b")):
        if "" in words:
            raise ValueError("words: one of them is empty")
        self.words = words

    def task(self, rng):
        word = rng.choice(self.words)
        return Task((user(word),), word)

    async def reply(self, task, answers):
        said = answers[-1].text
        return Outcome({"same": float(said == task.data), "long": float(len(said))})

class Bare(TurnEnvironment):
    def task(self, rng):
        return Task((user("?"),), None)

    async def reply(self, task, answers):
        return Outcome({"any": 1.0})

class Plain:
    pass

class Unfinished(TurnEnvironment):
    def task(self, rng):
        return Task((user("?"),), None)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(path, rewards=None, **args):
    return make(
        Environment(name="mine", type="python", args={"path": path, "args": args}, rewards=rewards or {})
    )


async def test_a_class_in_a_file(folder):
    it = environment("own.py:Echo", words=["c"], rewards={"long": 0.5})
    task = it.task(Random(0))
    assert task.messages[0]["content"] == "c"
    assert worth(await it.reply(task, [Answer("c")]), it) == 1.5
    bare = environment("own.py:Bare")
    assert worth(await bare.reply(bare.task(Random(0)), [Answer("c")]), bare) == 1.0


def test_an_entry_point_of_an_installed_package(folder, monkeypatch):
    package = folder / "site"
    information = package / "echoes-1.0.dist-info"
    information.mkdir(parents=True)
    (package / "echoes.py").write_text(OWN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[stackrl.environments]\necho = echoes:Echo\n")
    monkeypatch.syspath_prepend(package)
    try:
        assert type(environment("echo")).__name__ == "Echo"
    finally:
        sys.modules.pop("echoes", None)
    with pytest.raises(EnvironmentRefused, match=r"'mine': echos: no installed package .*\(there are .*echo"):
        environment("echos")


@pytest.mark.parametrize(
    ("path", "args", "why"),
    [
        ("own.py:Echo", {"wrds": ["c"]}, r"own.py:Echo: args: Additional properties .*'wrds' was unexpected"),
        ("own.py:Echo", {"words": [3]}, r"own.py:Echo: args.words.0: 3 is not of type 'string'"),
        ("own.py:Echo", {"words": [""]}, "words: one of them is empty"),
        ("own.py:Bare", {"words": [""]}, r"Bare\(\) takes no arguments|unexpected keyword"),
        ("own.py:Plain", {}, "own.py:Plain is no environment: derive the class from TurnEnvironment"),
        ("own.py:Unfinished", {}, "abstract"),
        ("own.py:Other", {}, "own.py has no Other"),
        ("other.py:Echo", {}, "there is no file"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(folder, path, args, why):
    with pytest.raises(EnvironmentRefused, match=f"environment 'mine': .*({why})"):
        environment(path, **args)


def test_a_file_that_fails_is_told_with_its_error(folder):
    (folder / "own.py").write_text("import no_such_package\n")
    with pytest.raises(EnvironmentRefused, match=r"own.py cannot be imported: ModuleNotFoundError"):
        environment("own.py:Echo")


def test_an_agent_of_ones_own_is_led_by_workers(folder):
    (folder / "agent.py").write_text(
        OWN
        + """
class Agent(AgentEnvironment):
    def task(self, rng):
        return Task((user("?"),), None)

    async def rollout(self, task, policy):
        return Outcome({"any": 1.0})
"""
    )
    assert isinstance(environment("agent.py:Agent"), AgentEnvironment)
