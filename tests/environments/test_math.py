"""Mathematics: answers are compared as such, whatever is in them, and problems come from files or the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest

import stacks
from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.base import Answer
from stackrl.runtime.environments.math import KNOWN, MATH_VERIFY, last_boxed
from stackrl.runtime.environments.math_comparison import Comparison, ReferenceProblem
from stackrl.schemas.environments import Environment


def environment(**args):
    return make(Environment(name="it", type="math", args=args))


def written(folder: Path, *rows: dict) -> str:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def comparison():
    return Comparison(processes=1, limit=2)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{ x }", "x"),
        ("\\boxed{1", None),
        ("42", None),
    ],
)
def test_what_stands_in_the_last_box(text, content):
    assert last_boxed(text) == content


@pytest.mark.slow
def test_answers_are_compared_as_mathematics(comparison):
    for gold, answer in [
        ("1/2", "0.5"),
        ("\\frac{1}{2}", "\\frac{2}{4}"),
        ("1000", "1,000"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("(1, 2)", "(1,2)"),
        ("x^2 + 2x", "2x + x^2"),
        ("\\frac{\\pi}{3}", "\\pi/3"),
        ("-7", "-7.0"),
    ]:
        assert comparison.equal(gold, answer) is True, (gold, answer)
    for gold, answer in [("1/2", "0.51"), ("(1, 2)", "(2, 1)"), ("7", "-7"), ("3", "1, 2, 3"), ("3", "hm")]:
        assert comparison.equal(gold, answer) is False, (gold, answer)
    with pytest.raises(ReferenceProblem, match="the reference '}' is no mathematics"):
        comparison.equal("}", "3")


@pytest.mark.slow
@pytest.mark.parametrize("bomb", ["9^{9^{9^{9^9}}}", "7" * 3000, "\\sqrt{" * 300])
def test_an_answer_that_takes_for_ever_is_given_up_and_the_next_one_is_compared(comparison, bomb):
    begun = time.monotonic()
    assert not comparison.equal("3", bomb)
    assert time.monotonic() - begun < 60
    assert comparison.equal("3", "3") is True


@pytest.mark.slow
async def test_a_rollout(tmp_path):
    file = written(tmp_path, {"question": "What is a half?", "answer": "One of two.\n#### 1/2"})
    it = environment(dataset=file, question="question")
    task = it.task(Random(0))
    assert task.messages[0]["content"].startswith("What is a half?\nReason step by step")
    right = await it.reply(task, [Answer("It is \\boxed{0.5}")])
    assert right.done and right.rewards == {"right": 1.0} and right.metrics["solved"] == 1.0
    unboxed = await it.reply(task, [Answer("It is 0.5")])
    assert unboxed.rewards == {"right": 0.0} and unboxed.metrics["boxed"] == 0.0
    for thinking in ("<think>It is \\boxed{0.5}</think>I do not know", "<think>It is \\boxed{0.5}"):
        assert (await it.reply(task, [Answer(thinking)])).metrics["boxed"] == 0.0
    long = await it.reply(task, [Answer(f"\\boxed{{{'7' * 3000}}}")])
    assert long.rewards == {"right": 0.0} and long.metrics["incomparable"] == 1.0
    [shown] = it.demonstration(task, Random(0), 0.0)
    assert shown.answer == "\\boxed{1/2}"


def test_a_row_without_its_columns_is_refused_with_its_place(tmp_path):
    good, bad = {"problem": "1+1", "answer": 2}, {"problem": "1+2", "solution": 3}
    assert environment(dataset=written(tmp_path, good)).task(Random(0)).data == "2"
    with pytest.raises(EnvironmentRefused) as refusal:
        environment(dataset=written(tmp_path, good, bad))
    assert str(refusal.value) == (
        f"environment 'it': {tmp_path}/problems.jsonl:2: the row has no 'answer'; its columns are problem, "
        "solution: name the right one as `answer`"
    )
    with pytest.raises(EnvironmentRefused, match=r"'it': no file or folder is called .*nothing.jsonl"):
        environment(dataset=str(tmp_path / "nothing.jsonl"))


CACHED = """
from random import Random
from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.schemas.environments import Environment

def made(**args):
    return make(Environment(name="it", type="math", args=args))

print(made(dataset="gsm8k").task(Random(0)).data)
for args in ({"dataset": "openai/gsm8k", "subset": "main", "split": "test"}, {"dataset": "no/such"}):
    try:
        made(**args)
    except EnvironmentRefused as error:
        print(error)
"""


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_from_its_parquet(tmp_path):
    repository, commit = tmp_path / "datasets--openai--gsm8k", "0" * 40
    folder = repository / "snapshots" / commit / "main" / "train"
    folder.mkdir(parents=True)
    (repository / "refs/refs/convert").mkdir(parents=True)
    (repository / "refs/refs/convert/parquet").write_text(commit)
    table = pyarrow.table({"question": ["1+1?"], "answer": ["It is 2.\n#### 2"]})
    pyarrow.parquet.write_table(table, folder / "0000.parquet")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True, timeout=120
    )
    gold, no_split, no_set = done.stdout.splitlines()
    assert gold == "2"
    assert "the data set openai/gsm8k has no split 'test' in subset 'main'" in no_split
    assert "the data set no/such cannot be fetched from the Hugging Face Hub: " in no_set
    assert "save it as .jsonl or .parquet and give the file's path instead" in no_set


def test_the_version_that_an_error_names_is_the_one_that_the_package_asks_for():
    project = tomllib.loads((stacks.ROOT / "pyproject.toml").read_text())["project"]
    assert MATH_VERIFY in project["optional-dependencies"]["runtime"]


def test_short_names_are_of_data_sets_of_the_hub():
    assert all("/" in known.dataset for known in KNOWN.values())
