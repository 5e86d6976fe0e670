"""Metrics reach the run's folder line by line, and wandb where the stack asks for it."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from fake_roles import make_run, stack

from stackrl.runtime.monitor.metrics import JsonLines, open_sinks
from stackrl.runtime.run import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return make_run()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_that_is_there_at_once(run: RunFolder) -> None:
    with open_sinks(run, stack()) as sink:
        sink.log({"index": 0, "reward": 0.5, "trainer/loss": float("nan")})
        assert lines(run.metrics)[0] | {"time": 0} == {
            "time": 0,
            "index": 0,
            "reward": 0.5,
            "trainer/loss": None,
        }
        sink.event("stage_started", stage="main")
        assert lines(run.events)[0]["event"] == "stage_started"
    with open_sinks(run, stack()) as sink:  # a resumed run
        sink.log({"index": 1})
    assert [record["index"] for record in lines(run.metrics)] == [0, 1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run.metrics, run.events)} == {0o600}


def test_a_line_that_a_killed_process_left_torn_spoils_no_other(run: RunFolder) -> None:
    run.metrics.write_text('{"index": 0}\n{"ind')
    with open_sinks(run, stack()) as sink:
        sink.log({"index": 1})
    first, torn, last = run.metrics.read_text().splitlines()
    assert (first, torn) == ('{"index": 0}', '{"ind') and json.loads(last)["index"] == 1


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    file = JsonLines(tmp_path / "full")
    with pytest.raises(OSError, match=r"No space left on device: .*full"):
        file.log({"index": 0})
    file.close()


@pytest.mark.slow
def test_wandb_records_offline_without_a_key_and_without_secrets(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACKRL_TOKEN", "a-token-that-nobody-may-see")
    with open_sinks(run, stack(monitors={"wandb": {"project": "test"}})) as sink:
        for index in range(3):
            sink.log({"index": index, "kind": "rl", "reward": index / 10})
        sink.event("checkpoint", index=3)
        sink.event("evaluated", stage="main", when="after", index=3, greedy_exact=0.7, prompts=256)
        sink.event("evaluated", stage="main", when="held-out long", index=3, greedy_exact=0.7, prompts=256)
    (written,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    recorded = re.findall(
        rb"reward.{1,3}?(0\.\d)", written.read_bytes(), re.DOTALL
    )  # key, tag, value as JSON
    assert sorted({*recorded}) == [b"0.1", b"0.2"]
    evaluated = set(re.findall(rb"evaluation/[a-z_ /-]*", written.read_bytes()))
    assert evaluated == {b"evaluation/main/greedy_exact", b"evaluation/held-out long/greedy_exact"}
    assert b"reverse_text" in written.read_bytes()  # the stack is the run's config
    for path in run.path.rglob("*"):
        assert path.is_dir() or b"a-token-that-nobody-may-see" not in path.read_bytes()


def test_metrics_need_no_wandb(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    open_sinks(run, stack()).close()
    with pytest.raises(SystemExit, match="pip install"):
        open_sinks(run, stack(monitors={"wandb": {"project": "test"}}))
