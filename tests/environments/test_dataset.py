"""Prompts and rewards of one's own: rows, functions by path, their faults, and what a stack may say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
import small_runs

import stacks
from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.base import Answer
from stackrl.runtime.environments.functions import FunctionError
from stackrl.runtime.orchestrator.errors import BadInput, first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.rollout import worth
from stackrl.runtime.orchestrator.supervised import Demonstrations
from stackrl.schemas.environments import Environment
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError
from stackrl.schemas.stack import Stack

REWARDS = """
import asyncio, time

def right(answer, row):
    return answer.strip() == row["answer"]

def short(answer, row):
    return 1 / (1 + len(answer))

async def later(answer, row):
    await asyncio.sleep(0)
    return 0.5

def wrong_number(answer, row):
    return "much"

def broken(answer, row):
    return row["no such column"]

def changing(answer, row):
    row["tests"].pop()
    row["more"]["inner"] = "changed"
    del row["answer"]
    return 1

async def changing_later(answer, row):
    await asyncio.sleep(0)
    return changing(answer, row)

def hanging(answer, row):
    time.sleep(3600)

def leaving(answer, row):
    raise SystemExit(3)

def too_few(answer):
    return 1.0

NUMBER = 3
"""
ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a run is started: with rows and rewards, so that both can be named by relative paths."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    write(tmp_path / "rows.jsonl", *ROWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: Path, *rows: dict) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(rewards=None, **args):
    args = {"dataset": "rows.jsonl", "reward": "rewards.py:right", **args}
    return make(Environment(name="mine", type="dataset", args=args, rewards=rewards or {}))


async def test_a_row_is_a_task_and_the_function_its_reward(folder):
    it = environment(system="Be short.")
    asked = set()
    for seed in range(20):
        task = it.task(Random(seed))
        assert task == it.task(Random(seed))
        system, question = task.messages
        assert (system["role"], system["content"]) == ("system", "Be short.")
        asked.add(question["content"])
        outcome = await it.reply(task, [Answer(f" {task.data['answer']}\n")])
        assert outcome.done and outcome.rewards == {"right": 1.0} and outcome.metrics == {"solved": 1.0}
        assert (await it.reply(task, [Answer("7")])).rewards == {"right": 0.0}
    assert asked == {"1+1?", "2+2?"}


async def test_several_rewards_have_names_and_weights(folder):
    functions = {"exact": "rewards.py:right", "brief": "rewards.py:short", "slow": "rewards.py:later"}
    it = environment(reward=functions, rewards={"exact": 2.0, "brief": -1.0})
    outcome = await it.reply(it.task(Random(0)), [Answer("???")])
    assert outcome.rewards == {"exact": 0.0, "brief": 0.25, "slow": 0.5}
    assert worth(outcome, it) == 0.25


async def test_rows_may_be_chats_in_parquet_under_other_names(folder):
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    more = [{"role": "user", "content": "and 1?"}]
    table = pyarrow.table({"conversation": [chat + more], "gold": ["3"]})
    pyarrow.parquet.write_table(table, folder / "chats.parquet")
    it = environment(dataset="*.parquet", prompt="conversation", answer="gold", reward="rewards.py:short")
    task = it.task(Random(0))
    assert list(task.messages) == chat + more and task.data["gold"] == "3"
    assert it.demonstration(task, Random(0), 0.0)[0].answer == "3"


async def test_rows_are_read_again_when_their_file_has_changed(folder):
    assert environment().task(Random(0)).data in ROWS
    write(folder / "rows.jsonl", {"prompt": "a longer question?", "answer": "x"})
    assert environment().task(Random(0)).messages[0]["content"] == "a longer question?"
    assert environment(limit=1).task(Random(0)).data["answer"] == "x"


async def test_the_function_of_a_changed_file_is_the_new_one(folder):
    task = environment().task(Random(0))
    (folder / "others.py").write_text("def right(answer, row):\n    return 3\n")
    assert (await environment(reward="others.py:right").reply(task, [Answer("")])).rewards == {"right": 3.0}
    assert (await environment(reward="others:right").reply(task, [Answer("")])).rewards == {"right": 3.0}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("wrong_number", "returned 'much', not a number"),
        ("broken", r"raised KeyError: 'no such column' \(rewards.py, line 18\)"),
        ("leaving", r"raised .*SystemExit\(3\)"),
    ],
)
async def test_a_reward_that_fails_fails_the_rollout(folder, function, why):
    it = environment(reward=f"rewards.py:{function}")
    with pytest.raises(FunctionError, match=rf"reward '{function}' \(rewards.py:{function}\) {why}"):
        await it.reply(it.task(Random(0)), [Answer("2")])


async def test_a_reward_that_hangs_fails_the_rollout_after_its_time(folder):
    it = environment(reward="rewards.py:hanging", timeout=0.2)
    with pytest.raises(TimeoutError, match=r"reward 'hanging' \(rewards.py:hanging\) took over 0.2 s"):
        await asyncio.wait_for(it.reply(it.task(Random(0)), [Answer("2")]), timeout=60)


@pytest.mark.parametrize("function", ["changing", "changing_later"])
async def test_a_reward_cannot_change_the_rows(folder, function):
    row = {"prompt": "1+1?", "answer": "2", "tests": ["a", "b"], "more": {"inner": "as it was"}}
    write(folder / "rows.jsonl", row)
    it = environment(reward=f"rewards.py:{function}")
    task = it.task(Random(0))
    for _ in range(3):
        assert (await it.reply(task, [Answer("2")])).rewards == {function: 1.0}
    assert task.data == row and it.task(Random(0)) == task


async def test_the_first_reward_tells_whether_a_task_is_solved(folder):
    both = {"exact": "rewards.py:right", "brief": "rewards.py:short"}
    for names, solved in ((["exact", "brief"], 1.0), (["brief", "exact"], 0.0)):
        it = environment(reward={name: both[name] for name in names})
        task = it.task(Random(0))
        outcome = await it.reply(task, [Answer(task.data["answer"])])
        assert outcome.rewards["exact"] == 1.0 > outcome.rewards["brief"]
        assert outcome.metrics == {"solved": solved}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"reward": "nowhere.py:right"}, "there is no file .*/nowhere.py"),
        ({"reward": "rewards.py:wright"}, "rewards.py has no wright"),
        ({"reward": "no_such_module:right"}, "no_such_module cannot be imported"),
        ({"reward": "right"}, "no installed package has an entry point of this name in stackrl.rewards"),
        ({"reward": "rewards.py:too_few"}, r"cannot be called as f\(answer, row\): too many positional"),
        ({"reward": "rewards.py:NUMBER"}, "cannot be called"),
        ({"dataset": "none.jsonl"}, "no file or folder is called"),
        ({"dataset": "empty.jsonl"}, "empty.jsonl has no rows"),
        ({"prompt": "question"}, r"rows.jsonl:1: the row has no 'question'; its columns are answer, prompt"),
        (
            {"dataset": "odd.jsonl"},
            "odd.jsonl:1: the row has neither a text nor a list of messages as 'prompt'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(folder, args, why):
    (folder / "empty.jsonl").write_text("\n")
    write(folder / "odd.jsonl", {"prompt": 3})
    with pytest.raises(EnvironmentRefused, match=f"environment 'mine': .*{why}"):
        environment(**args)


@pytest.mark.parametrize("nothing", [{}, {"answer": None}])
def test_demonstrations_need_a_right_answer(folder, nothing):
    write(folder / "rows.jsonl", {"prompt": "1+1?"} | nothing)
    it = environment()
    with pytest.raises(NotImplementedError, match="rows without 'answer' show no right answer"):
        it.demonstration(it.task(Random(0)), Random(0), 0.0)
    args = {"dataset": "rows.jsonl", "reward": "rewards.py:right"}
    mine = [{"name": "mine", "type": "dataset", "args": args}]
    stack = Stack.model_validate({**small_runs.STACK, "environments": mine})
    with pytest.raises(BadInput, match="'mine' has nothing for a supervised stage: rows without 'answer'"):
        Demonstrations(stack.stages[0], stack, small_runs.chat()).work(0)


def test_noise_keeps_the_shape_of_an_answer(folder):
    write(folder / "rows.jsonl", {"prompt": "?", "answer": "ab 12: cd"})
    it = environment()
    [turn] = it.demonstration(it.task(Random(0)), Random(0), 1.0)
    assert turn.answer[2] == turn.answer[6] == " " and turn.answer[3:5].isdigit() and turn.answer[5] == ":"
    assert turn.answer != "ab 12: cd"


async def test_a_run_ends_before_its_first_step_where_an_environment_cannot_be_made(folder):
    args = {"dataset": "rows.jsonl", "reward": "rewards.py:wright"}
    mine = [{"name": "mine", "type": "dataset", "args": args}]
    rl = {"name": "later", "type": "rl", "steps": 1, "environments": mine}
    run = small_runs.make_run(folder, stages=[small_runs.STACK["stages"][0], rl])
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(orchestrate(run, small_runs.TOKEN, []), timeout=60)
    refusal = first_cause(failure.value)
    assert isinstance(refusal, EnvironmentRefused) and "rewards.py has no wright" in str(refusal)


# ---- what a stack may say


def problems(folder: Path, line: str) -> list[str]:
    file = stacks.write(folder, ("- {name: reverse, type: reverse_text, args: {letters: [3, 6]}}", line))
    with pytest.raises(StackError) as found:
        load(file)
    return [str(problem) for problem in found.value.problems]


JUDGE = "{judge: {endpoint: 'https://judge', model: m, secret: JUDGE_KEY}}"
JUDGED = f"{{dataset: a.jsonl, reward: {{good: {JUDGE}}}}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "- {name: x, type: arithmetic, rewards: {rigth: 1}}",
            "environments.0.rewards.rigth: arithmetic has no reward of this name; did you mean right?",
        ),
        (
            "- {name: x, type: dataset, args: {dataset: a.jsonl, reward: 'r.py:right'}, rewards: {good: 1}}",
            "environments.0.rewards.good: dataset has no reward of this name; it has right",
        ),
        (
            f"- {{name: x, type: dataset, args: {JUDGED}}}",
            "environments.0.args.reward.good.judge.secret: nothing brings the environment variable JUDGE_KEY "
            "to the nodes; add secrets: {JUDGE_KEY: null}",
        ),
        (
            "- {name: x, type: dataset, args: {dataset: a.jsonl, reward: {good: 3}}}",
            "environments.0.args.reward.good: must be text or a mapping of keys, is 3",
        ),
        (
            "- {name: x, type: dataset, args: {dataset: a.jsonl}}",
            "environments.0.args.reward: the key reward is missing",
        ),
        (
            "- {name: x, type: python, args: {path: 'my file.py:It'}}",
            "environments.0.args.path: 'my file.py:It' is not written as it must be; for example "
            "my_environment.py:Countdown",
        ),
    ],
)
def test_wrong_stacks(tmp_path, line, expected):
    assert any(expected in problem for problem in problems(tmp_path, line)), problems(tmp_path, line)


def test_weights_of_known_rewards_and_of_those_that_only_code_knows_are_fine(tmp_path):
    mine = "- {name: x, type: python, args: {path: 'mine.py:It'}, rewards: {whatever: 1}}"
    sums = "\n      - {name: y, type: arithmetic, rewards: {right: 1, digits: 0.1}}"
    good = ("- {name: reverse, type: reverse_text, args: {letters: [3, 6]}}", mine + sums)
    load(stacks.write(tmp_path, good))
