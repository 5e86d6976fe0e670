"""Three nodes, each the real program at an address of its own: two of the trainer, one of the real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engine_server import ONE_PROCESS_LESS
from fake_roles import fresh_home

from stackrl.runtime.launch.audit import audit
from stackrl.runtime.processes import send
from stackrl.runtime.run import all_runs

pytestmark = pytest.mark.nightly  # by default with quick roles: tests/node/test_several_nodes.py

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
LIMIT = 400.0


def test_three_nodes_find_each_other_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((ROOT / "stacks" / "reverse-text-2-nodes.yaml").read_text())
    file = tmp_path / "three.yaml"
    parts = task["_metadata"]["stack"]
    parts["roles"] = {"trainer": {"nodes": 2}, "inference": {"nodes": 1}}
    parts["inference"]["arguments"] = ONE_PROCESS_LESS
    parts["checkpoint"] = {"path": str(tmp_path / "checkpoints"), "every": 1}
    file.write_text(yaml.safe_dump(task | {"num_nodes": 3, "envs": {"STACK": file.name}}))
    with fresh_home(tmp_path, monkeypatch):
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "stackrl", "node", str(file)],
                cwd=tmp_path,
                stdout=(tmp_path / f"node-{rank}.log").open("wb"),
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "SKYPILOT_NODE_RANK": str(rank),
                    "SKYPILOT_NUM_NODES": "3",
                    "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
                    "SKYPILOT_TASK_ID": f"sky-{tmp_path}",
                    "STACKRL_METADATA": "http://127.0.0.1:9",
                    "STACKRL_TOKEN": "a-token-of-these-tests",
                },
            )
            for rank in range(3)
        ]
        try:
            codes = [node.wait(LIMIT) for node in nodes]
        finally:
            for node in nodes:
                send(node.pid, signal.SIGTERM)
        logs = "\n".join((tmp_path / f"node-{rank}.log").read_text()[-4000:] for rank in range(3))
        assert codes == [0, 0, 0], logs
        (run,) = all_runs()
        books = audit(run)
    assert books.clean
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [step["index"] for step in steps] == [0, 1, 2]
    # the third node samples from what the ranks of the other two hold; keys of an older version stay
    assert steps[0]["trainer/mismatch_kl"] < 1e-9
    assert max(step["trainer/mismatch_kl"] for step in steps) < 1e-3
    assert {step["trainer/skipped"] for step in steps} == {0.0}
