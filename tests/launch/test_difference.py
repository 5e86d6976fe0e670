"""What two runs differ in: keys, versions, lineage and results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import STACK, fresh_home, make_run, stack

from stackrl.runtime.launch import difference
from stackrl.runtime.run import RunFolder, State

WARMUP, MAIN = STACK["stages"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def a_run(rewards: list[float], *, versions: dict[str, Any] | None = None, **changes: Any) -> RunFolder:
    run = make_run()
    run.write_plan(stack(**changes), {})
    run.write("run.json", run.read("run.json") | {"versions": versions or {"torch": "2.13.0"}})
    records = (
        {"index": 20 + step, "stage": "main", "kind": "rl", "reward": reward, "time": 0.0}
        for step, reward in enumerate(rewards)
    )
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def of(entries: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {entry["key"]: (entry.get("left", "absent"), entry.get("right", "absent")) for entry in entries}


def test_two_runs_of_one_stack_differ_in_nothing() -> None:
    left, right = a_run([0.5]), a_run([0.5])
    found = difference.difference(left, right)
    assert (found["stack"], found["versions"], found["results"]) == ([], [], [])
    assert difference.table(found).count("the same") == 3


def test_keys_are_those_that_set_takes_and_entries_of_lists_go_by_name() -> None:
    left = a_run([], algorithm={"loss": {"type": "aipo", "ratio_cap": 3.0}})
    right = a_run(
        [],
        seed=4,
        algorithm={"loss": {"type": "grpo"}},
        stages=[WARMUP | {"steps": 30}, MAIN, MAIN | {"name": "more"}],
    )
    found = of(difference.difference(left, right)["stack"])
    assert found["seed"] == (0, 4)
    assert found["algorithm.loss.type"] == ("aipo", "grpo")
    assert found["algorithm.loss.ratio_cap"] == (3.0, "absent")
    assert found["algorithm.loss.clip_low"] == ("absent", 0.2)
    assert found["stages.warmup.steps"] == (20, 30)
    assert found["stages (order)"] == (["warmup", "main"], ["warmup", "main", "more"])
    assert found["stages.more.steps"] == ("absent", 60)
    assert not any(key.startswith("stages.main") or key.startswith("model") for key in found)


def test_versions_and_results() -> None:
    left = a_run([0.1] * 10 + [0.4] * 10, versions={"torch": "2.13.0", "commit": "abc"})
    right = a_run([0.1] * 10 + [0.8] * 5, versions={"torch": "2.13.0", "commit": "abc+changes"})
    right.write_state(State("finished", attempt=1))
    right.events.write_text(
        json.dumps({"event": "evaluated", "stage": "main", "when": "after", "time": 1.0, "reward": 0.7})
        + "\n"
    )
    found = difference.difference(left, right)
    assert of(found["versions"]) == {"commit": ("abc", "abc+changes")}
    results = of(found["results"])
    assert results["status"] == ("created", "finished")
    assert results["step"] == (40, 35) and results["reward"] == (0.4, 0.8)
    assert results["main: last rewards"] == (pytest.approx(0.4), pytest.approx((2 * 0.1 + 5 * 0.8) / 7))
    assert results["main: after: reward"] == ("absent", 0.7)


def test_the_lineage_is_told_as_far_as_it_is_known() -> None:
    first, second, third = a_run([]), a_run([]), a_run([])
    second.write("run.json", second.read("run.json") | {"parent": {"run": first.id, "step": 50}})
    third.write("run.json", third.read("run.json") | {"parent": {"run": second.id, "step": 80}})
    found = difference.difference(first, third)
    assert found["lineage"] == {
        "left": [],
        "right": [{"run": second.id, "step": 80}, {"run": first.id, "step": 50}],
    }
    assert f"{second.id}@80 ← {first.id}@50" in difference.table(found)
    shutil.rmtree(second.path)
    assert difference.lineage(third) == [{"run": second.id, "step": 80}]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    left, right = a_run([0.5]), a_run([0.25], seed=4)
    assert difference.diff(left.id, right.id, "json") == 0
    assert json.loads(capsys.readouterr().out) == difference.difference(left, right)
    assert difference.diff(left.id, right.id, "table") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [left.id, right.id]
    assert ["seed", "0", "4"] in lines and ["reward", "0.5", "0.25"] in lines
