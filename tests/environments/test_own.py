"""Environments of one's own, by path and by the entry point of an installed package."""

from __future__ import annotations

import sys
from random import Random

import pytest

from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.base import AgentEnvironment, Answer, Call, Outcome, user
from stackrl.runtime.environments.workers.own import _Policy
from stackrl.runtime.environments.workers.worker import _as_data
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

class Rude(TurnEnvironment):
    def __init__(self, error):
        raise {"OSError": OSError(2, "no such file", "nofile"), "KeyError": KeyError("largest"),
               "SystemExit": SystemExit(3), "empty": ValueError(), "own": Own("it is broken")}[error]

    def task(self, rng):
        return Task((user("?"),), None)

    async def reply(self, task, answers):
        return Outcome({"any": 1.0})

class Own(Exception):
    pass

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
    monkeypatch.setattr(sys, "path", list(sys.path))
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
        ("own.py:Rude", {"error": "OSError"}, "FileNotFoundError: .*no such file: 'nofile'"),
        ("own.py:Rude", {"error": "KeyError"}, "KeyError: 'largest'"),
        ("own.py:Rude", {"error": "SystemExit"}, "SystemExit: 3"),
        ("own.py:Rude", {"error": "empty"}, "ValueError$"),
        ("own.py:Rude", {"error": "own"}, "Own: it is broken"),
        ("own.py:Other", {}, "own.py has no Other"),
        ("other.py:Echo", {}, "there is no file"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(folder, path, args, why):
    with pytest.raises(EnvironmentRefused, match=f"environment 'mine': .*({why})"):
        environment(path, **args)


@pytest.mark.parametrize("path", ["own.py:Echo", "leaving:Echo"])
@pytest.mark.parametrize(
    ("line", "error"),
    [("import no_such_package", "ModuleNotFoundError"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_file_that_fails_is_told_with_its_error(folder, path, line, error):
    for name in ("own.py", "leaving.py"):
        (folder / name).write_text(line + "\n")
    with pytest.raises(EnvironmentRefused, match=f" cannot be imported: {error}"):
        environment(path)


def test_a_file_may_import_what_is_in_the_work_directory(folder):
    """Whatever was imported from there before, and hiding nothing that is installed."""
    (folder / "riddles_of_mine").mkdir()
    (folder / "riddles_of_mine" / "helper.py").write_text("WORDS = ('from a helper',)\n")
    (folder / "json.py").write_text("raise RuntimeError('the one of the work directory')\n")
    (folder / "riddles_of_mine" / "it.py").write_text(
        "import json\nfrom riddles_of_mine.helper import WORDS\n"
        + OWN.replace('words=("a", "b")', "words=WORDS")
    )
    try:
        it = environment("riddles_of_mine/it.py:Echo")
    finally:
        for name in ("riddles_of_mine", "riddles_of_mine.helper"):
            sys.modules.pop(name, None)
    assert it.task(Random(0)).data == "from a helper"


@pytest.mark.parametrize(("name", "mend"), [("lnog", "did you mean long"), ("x", "there is same, long")])
def test_a_weight_of_a_reward_that_the_class_does_not_have_is_refused(folder, name, mend):
    with pytest.raises(EnvironmentRefused, match=f"'mine': rewards.{name}: there is no reward .*; {mend}"):
        environment("own.py:Echo", rewards={"same": 1.0, name: 0.1})


async def test_a_worker_tells_its_environment_whether_an_answer_began_within_thoughts():
    class Connection:
        seconds = 1.0

        async def ask(self, messages):
            return _as_data(Answer("is it 3?", (Call("f", {"x": 1}),), closed=False, thinking=True))

    answer = await _Policy(Connection()).answer(user("?"))
    assert answer == Answer("is it 3?", (Call("f", {"x": 1}),), closed=False, thinking=True)
    assert answer.said == ""


async def test_a_weight_of_a_reward_that_no_rollout_gives_fails_it(folder):
    bare = environment("own.py:Bare", rewards={"any": 0.5})
    assert worth(await bare.reply(bare.task(Random(0)), [Answer("c")]), bare) == 0.5
    typo = environment("own.py:Bare", rewards={"any": 0.5, "ayn": 0.1})
    outcome = await typo.reply(typo.task(Random(0)), [Answer("c")])
    with pytest.raises(
        ValueError, match=r"of the stack weighs ayn, and the environment gave any; .*`weights`"
    ):
        worth(outcome, typo)


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
    it = environment("agent.py:Agent", rewards={"ayn": 1.0})
    assert isinstance(it, AgentEnvironment)
    with pytest.raises(ValueError, match="weighs ayn"):
        worth(Outcome({"any": 1.0}), it)
