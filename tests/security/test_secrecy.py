"""The token of a run is in its processes' environment and in their requests, and nowhere else."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import fresh_home, make_run, process, start_node, wait_until

from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.processes import descendants
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.auth import authorized, bearer, blotted

pytestmark = pytest.mark.slow

SECRET = "a-token-that-nobody-may-read"
TALKS = """
import json, os, pathlib, sys, time
from stackrl.runtime import heartbeat
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.run import RunFolder, run_token
heartbeat.start()
token, run = run_token(), RunFolder(sys.argv[1])
print("my headers are", {"Authorization": f"Bearer {token}"}, flush=True)
print(f"GET http://127.0.0.1:1/x?token={token} failed", file=sys.stderr, flush=True)
with Sink(run, []) as sink:
    sink.event("dropped", reason="failed", error=f"the server said: Bearer {token}", lengths=[1, 2])
    sink.log({"index": 0, "step": 0, "stage": "main", "stage_step": 0, "stage_steps": 60, "kind": "rl",
              "reward": float("nan"), "why": [f"({token})"]})
(run.path / "said").touch(mode=0o600)
time.sleep(2)
sys.exit(f"error: cannot reach http://127.0.0.1:1/?token={token}")
"""


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run whose role says the token wherever it can, and fails. Command lines are looked at meanwhile."""
    with fresh_home(tmp_path, monkeypatch):
        run = make_run(process("orchestrator", TALKS, "RUN"))
        node = start_node(run, report=True, STACKRL_TOKEN=SECRET)
        wait_until(lambda: (run.path / "said").exists())
        for pid in [node.pid, *descendants(node.pid)]:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        out, _ = node.communicate(timeout=60)
        assert SECRET not in out
        yield run


def test_the_token_is_in_no_file_of_the_run_and_in_no_words(ended: RunFolder) -> None:
    files = [path for path in ended.path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "events.jsonl", "state.json", "orchestrator.log"} <= {
        path.name for path in files
    }
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "***" in ended.events.read_text() and "***" in ended.metrics.read_text()
    assert "***" in ended.state().reason and "***" in (ended.logs(1) / "orchestrator.log").read_text()
    for verb in ("status", "logs", "audit", "report"):
        told = subprocess.run(
            [sys.executable, "-m", "stackrl", verb, ended.id], capture_output=True, text=True, timeout=60
        )
        assert SECRET not in told.stdout + told.stderr
    assert SECRET.encode() not in (ended.path / "report.html").read_bytes()


def test_what_a_run_writes_is_its_owners_alone(ended: RunFolder) -> None:
    for path in [ended.path, *ended.path.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


class Remembers:
    """A destination such as Weights & Biases."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def log(self, record: dict) -> None:
        self.records.append(record)

    event = log

    def close(self, *, failed: bool) -> None:
        pass


def test_other_destinations_of_metrics_do_not_get_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACKRL_TOKEN", SECRET)
    wandb = Remembers()
    with Sink(RunFolder(tmp_path), [wandb]) as sink:
        sink.event("dropped", error=f"Bearer {SECRET}")
        sink.log({"index": 0, "reward": 0.5})
    assert SECRET not in json.dumps(wandb.records) and wandb.records[1]["reward"] == 0.5


@pytest.mark.parametrize(
    "header",
    [None, "", SECRET, f"bearer {SECRET}", f"Bearer  {SECRET}", f"Bearer {SECRET} ", "Bearer ü\udcff"],
)
def test_only_the_exact_header_is_let_in(header: str | None) -> None:
    assert authorized(bearer(SECRET)["Authorization"], SECRET)
    assert not authorized(header, SECRET)


def test_blotting() -> None:
    assert blotted(f"http://x/?token={SECRET}&a=b {SECRET}", SECRET) == "http://x/?token=***&a=b ***"
    assert blotted("as it is", "") == "as it is"
