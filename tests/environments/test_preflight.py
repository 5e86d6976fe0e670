"""What `validate` finds out about environments with code or data of the user, and what a run tries first."""

from __future__ import annotations

import json

import pytest
from loopback import free_port
from small_runs import make_run

import stacks
from stackrl.cli import main
from stackrl.runtime.environments import preflight
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.reading import Reading

pytestmark = pytest.mark.slow
OWN = """
from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Task, TurnEnvironment, user

class Echo(TurnEnvironment):
    weights = {"same": 1.0}

    def __init__(self, words):
        self.words = words

    def task(self, rng):
        return Task((user("?"),), None)

    async def reply(self, task, answers):
        return Outcome({"same": 1.0})

class Lab(AgentEnvironment):
    def task(self, rng):
        return Task((user("?"),), None)

    async def start(self):
        raise RuntimeError("the lab is closed")

    async def rollout(self, task, policy):
        return Outcome({"same": 1.0})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rewards.py").write_text("def right(answer, row):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dataset(**args):
    return {"type": "dataset", "args": {"dataset": "rows.jsonl", "reward": "rewards.py:right"} | args}


def own(path, **args):
    return {"type": "python", "args": {"path": path, "args": args}}


def validated(capsys, environments, *options):
    """What is said of a stack with ``environments``: its errors and its warnings, by key."""
    named = [{"name": f"e{number}", **one} for number, one in enumerate(environments)]
    options = [*options, "--set", f"environments={json.dumps(named)}"]
    with open("small.yaml", "w") as file:
        file.write(stacks.GOOD)
    code = main(["validate", "small.yaml", "-o", "json", *options])
    [told] = json.loads(capsys.readouterr().out)
    found = [{one["key"]: one["what"] for one in told[kind]} for kind in ("errors", "warnings")]
    assert code == (2 if found[0] else 0)
    return found


def test_what_cannot_be_made_is_told_at_its_place(folder, capsys):
    errors, warnings = validated(
        capsys,
        [
            dataset(),
            dataset(reward="rewards.py:rigt"),
            dataset(reward={"right": "reward.py:right"}),
            dataset(dataset="nothing.jsonl"),
            dataset(prompt="question"),
            own("own.py:Ech", words=[]),
            own("own.py:Echo", wrds=[]),
            own("own.py:Echo", words=[]),
            own("own.py:Echo", words=[]) | {"rewards": {"some": 1.0}},
            dataset(dataset="/there/it/is.jsonl"),
            dataset(reward="a_package_of_mine.rewards:right"),
            dataset(dataset="somebody/some-rows"),
        ],
    )
    expected = {
        1: "rewards.py has no rigt",
        2: "there is no file",
        3: "no file or folder is called",
        4: "the row has no 'question'",
        5: "own.py has no Ech",
        6: "unexpected keyword argument 'wrds'",
        8: "there is no reward of this name",
    }
    assert sorted(errors) == [f"environments.{number}.args" for number in expected]
    for number, why in expected.items():
        assert why in errors[f"environments.{number}.args"]
    assert "/there/it/is.jsonl" in warnings["environments.9.args"], "a node may have it"
    assert "a_package_of_mine" in warnings["environments.10.args"]
    assert "environments.11.args" not in warnings, "what is on the Hub is fetched by the run"


def test_nothing_is_started_where_all_is_built_in(folder, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "look", lambda *_, **__: pytest.fail("a process for nothing"))
    built_in = [{"type": "wordle"}, {"type": "math", "args": {"dataset": "gsm8k"}}, {"type": "arithmetic"}]
    errors, _ = validated(capsys, built_in)
    assert not errors


def judged(port):
    return dataset(
        reward={"good": {"judge": {"endpoint": f"http://127.0.0.1:{port}/v1", "model": "m", "tries": 1}}}
    )


def test_a_node_tries_judges_and_what_environments_start_with(folder, capsys):
    asked = [judged(free_port()), own("own.py:Lab"), own("own.py:Echo", words=[])]
    errors, _ = validated(capsys, asked, "--on-node")
    assert "the lab is closed" in errors.pop("environments.1")
    assert "judge m at http://127.0.0.1" in errors.pop("environments.0")
    assert not errors
    errors, _ = validated(capsys, asked)
    assert not errors, "elsewhere they may be there"


@pytest.mark.parametrize("kind", ["judge", "lab"])
def test_a_run_tries_them_before_it_learns_anything(folder, kind):
    described = judged(free_port()) if kind == "judge" else own(f"{folder / 'own.py'}:Lab")
    run = make_run(folder, environments=[{"name": "mine", **described}])
    reading = Reading(run, run.stack(), None, {}, lambda *_: True)
    with pytest.raises(OrchestratorError, match=r"'mine' cannot be used: .*(judge m at|the lab is closed)"):
        reading.read()
