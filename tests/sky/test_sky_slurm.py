"""A run on two nodes goes through SkyPilot to a real Slurm: machines, stack, token, engine, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import skypilot_slurm

import stacks

TWO = stacks.ROOT / "stacks" / "reverse-text-2-nodes.yaml"
CHANGES = (
    ("resources: {infra: slurm, cpus: 2+}", "resources: {infra: slurm/tower/cpu, cpus: 2+, memory: 4+}"),
    ("STACK: stacks/reverse-text-2-nodes.yaml", "STACK: two.yaml"),
    ("setup: make install\n", ""),
    ("run: .venv/bin/stackrl", f"run: {sys.executable} -m stackrl"),
)
LIMIT = 900.0


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_run_goes_through_skypilot_to_slurm_and_back(tmp_path):
    if why := skypilot_slurm.lacking():
        pytest.skip(why)
    text = TWO.read_text()
    for old, new in CHANGES:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    work = tmp_path / "work"  # SkyPilot copies all of it
    work.mkdir()
    (work / "two.yaml").write_text(text)
    with skypilot_slurm.skypilot(tmp_path / "sky") as (tower, environment):

        def stackrl(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "stackrl", *words],
                cwd=work,
                env={**environment, "STACKRL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run = stackrl("launch", "two.yaml", "--infra", "sky", "-d").split()[-1]
        deadline = time.monotonic() + LIMIT
        while "finished" not in (said := stackrl("status", run)):
            assert time.monotonic() < deadline and "failed" not in said, said + stackrl("logs", run)
            time.sleep(10)
        assert "3/3" in stackrl("status")
        assert stackrl("exec", run, "--", "sh", "-c", "ls ~/.stackrl/runs").split() == [run]
        stackrl("down", run)
        assert not tower.command("squeue", "-h")
        token = [file for file in (tmp_path / "home").rglob("*") if b"STACKRL_TOKEN=" in _content(file)]
        assert token == []


def _content(file: os.PathLike[str]) -> bytes:
    return open(file, "rb").read() if os.path.isfile(file) else b""
