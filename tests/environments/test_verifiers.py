"""Packages of the Environments Hub, run by the real verifiers in interpreters of their own."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine
from fake_trainer import FakeTrainer
from hub_packages import install, python_of
from small_runs import TOKEN, chat, lines, make_run
from whole_runs import events_of

import stacks
from stackrl.runtime.environments.verifiers import preflight
from stackrl.runtime.launch import front
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.schemas.loader import load

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("packages", "quick_retries")]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "packages")))


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr("stackrl.runtime.orchestrator.reinforcement._RETRY_AFTER", 0.0)


def package(id, kind, **more):
    return {"name": id.rpartition("/")[2], "type": "verifiers", "id": id, "python": python_of(kind)} | more


def badly(prompt, rng):
    """The word that was asked for last, turned round, some letters wrong."""
    word = chat().text(prompt).rpartition("reverse: ")[2].partition("<|im_end|>")[0]
    return chat().answer("".join(rng.choice("xyz") if rng.random() < 0.4 else one for one in word[::-1]))


async def trained(run, engine):
    trainer = FakeTrainer(run, TOKEN)
    with trainer:
        await orchestrate(run, TOKEN, [engine])
    assert not trainer.errors
    return trainer


def run_of(tmp_path, *environments, **sampling):
    return make_run(
        tmp_path,
        environments=list(environments),
        stages=[{"name": "main", "type": "rl", "steps": 3}],
        trainer={"sequence_length": 512},
        inference={"max_model_length": 512},
        sampling={"max_tokens": 60, "timeout": 60.0} | sampling,
    )


@pytest.mark.parametrize(("id", "kind", "turns"), [("me/tiny-words", "v1", 1), ("tiny-classic", "v0", 2)])
async def test_a_package_trains(tmp_path, id, kind, turns):
    run, engine = run_of(tmp_path, package(id, kind, args={"words": 5})), FakeEngine(badly)
    trainer = await trained(run, engine)
    metrics = lines(run.metrics)
    assert [record["rollouts"] for record in metrics] == [16] * 3
    assert all(record["prefix_breaks"] == 0 and record["turns"] == turns for record in metrics)
    assert all(record["dropped"] == 0 and 0.5 < record["reward"] < 2.0 for record in metrics)
    for batch, record in zip(trainer.steps(), metrics, strict=True):
        assert batch.tokens == record["tokens_generated"] and batch.sequences == 16, "one sequence for each"
    asked = {chat().text(request["tokens"]).partition("reverse: ")[2][:4] for request in engine.requests}
    assert asked <= {"abcd", "bcde", "cdef", "defg", "efgh"}


async def test_calls_of_tools_are_the_sampled_tokens(tmp_path):
    def calls_or_tells(prompt, rng):
        text = chat().text(prompt)
        if "dcba" in text or "edcb" in text or "fedc" in text or "gfed" in text:
            return chat().answer(rng.choice(["dcba", "edcb"]))
        word = text.rpartition("reverse: ")[2][:4]
        called = {"name": "turn_round", "arguments": {"word": word}}
        return chat().answer(f"<tool_call>\n{json.dumps(called)}\n</tool_call>")

    run = run_of(tmp_path, package("tiny-tools", "v0"), max_tokens=120)
    await trained(run, FakeEngine(calls_or_tells))
    metrics = lines(run.metrics)
    assert all(record["turns"] == 2 and record["prefix_breaks"] == 0 for record in metrics)


@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
async def test_what_goes_wrong_inside_is_counted_and_the_run_goes_on(tmp_path, monkeypatch, fault):
    """A word in four is such a one, and its groups are replaced. A worker dies once, which costs nothing."""
    monkeypatch.setenv("TINY_FAULT", fault)
    monkeypatch.setenv("TINY_ONCE", str(tmp_path / "once"))
    failures = "retry" if fault == "die" else "drop"
    run = run_of(tmp_path, package("tiny-words", "v1", failures=failures, args={"words": 4}), timeout=20.0)
    await trained(run, FakeEngine(badly))
    assert [record["rollouts"] for record in lines(run.metrics)] == [16] * 3
    dropped = [
        event for event in events_of(run, "dropped") if event["reason"] == "failed" and "error" in event
    ]
    if fault == "die":
        assert (tmp_path / "once").exists() and not dropped
    else:
        why = {"raise": "no such word", "hang": "sampling.timeout"}[fault]
        assert dropped and all(why in event["error"] for event in dropped)


WORDS, CLASSIC = "me/tiny-words", "tiny-classic"
REFUSED = [
    ("v1", {"id": WORDS, "args": {"wordz": 3}}, "args", "wordz: Extra inputs", "it takes words, wrong"),
    ("v1", {"id": WORDS, "args": {"words": 0}}, "args", "has no task with these args", ""),
    ("v1", {"id": WORDS, "agent": {"turns": 3}}, "agent", "turns: Extra inputs", ""),
    ("v1", {"id": WORDS, "version": "0.2.0"}, "version", "0.1.0 is installed, not 0.2.0", "version: '0.1.0'"),
    ("v1", {"id": "me/absent"}, "id", "me/absent is not installed", "prime env install me/absent"),
    ("v1", {"id": "tiny-nothing"}, "id", "is no environment of verifiers", ""),
    (
        "v1",
        {"id": CLASSIC},
        "python",
        "is a classic (v0) environment, which verifiers 0.4",
        "verifiers==0.3.1",
    ),
    ("v0", {"id": WORDS}, "python", "is a v1 environment, which verifiers 0.3.1", "verifiers>=0.4,<0.5"),
    (
        "v0",
        {"id": CLASSIC, "args": {"word": 1}},
        "args",
        "unexpected keyword",
        "it takes words: int = 8, turns",
    ),
    ("v0", {"id": CLASSIC, "agent": {"max_turns": 2}}, "agent", "which has no agents", "remove it"),
]


@pytest.mark.parametrize(("kind", "described", "key", "what", "mend"), REFUSED)
def test_what_does_not_fit_is_told_before_a_run(tmp_path, kind, described, key, what, mend):
    looked = preflight.look(written(tmp_path, described | {"python": python_of(kind)}))
    [problem] = looked.errors + looked.absent
    assert what in problem.what and mend in problem.mend and not looked.told
    assert problem.path[-1] == key and problem.place.line > 1
    assert bool(looked.absent) == (key in ("id", "python")), "another machine may have it"


def test_what_fits_is_told(tmp_path, capsys):
    described = {"id": "me/tiny-words", "version": "0.1.0", "python": python_of("v1"), "args": {"words": 3}}
    loaded = written(tmp_path, described)
    assert front.validate([str(loaded.path)], [], True, "text") == 0
    told = "environment it: me/tiny-words 0.1.0, v1 on verifiers 0.4.0, 3 tasks"
    assert capsys.readouterr().out.endswith(f"fine\n  {told}\n")


def written(tmp_path, described):
    """A stack file with that environment."""
    environment = json.dumps({"name": "it", "type": "verifiers"} | described)
    before = "{name: reverse, type: reverse_text, args: {letters: [3, 6]}}"
    return load(stacks.write(tmp_path, (before, environment)), [])
