"""The trainer's benchmarks run, and say what they must."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from stacks import ROOT


def lines(script: str, *arguments: str) -> list[str]:
    """Rows of the table that a benchmark prints, without its head."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]


@pytest.mark.slow
def test_the_one_for_gpus_runs_on_a_cpu_in_small() -> None:
    rows = [row for row in lines("gpu_trainer.py", "--tiny") if "---" not in row]
    assert [re.match(r"\| ([^|]+) \| (\d+) \|", row).groups() for row in rows] == [
        ("Qwen3-0.6B", "256"),
        ("Qwen3-0.6B", "512"),
        ("Qwen3-30B-A3B, 4 layers", "256"),
    ]


@pytest.mark.slow
def test_it_asks_for_a_gpu() -> None:
    with pytest.raises(AssertionError, match="no CUDA GPU here; --tiny"):
        lines("gpu_trainer.py")


@pytest.mark.nightly
@pytest.mark.slow
def test_both_sides_of_a_row_compute_the_same() -> None:
    for words in ("1,float32", "1,bfloat16"):
        rows = [row for row in lines("trainer.py", "--small", "--rounds", "1", "--only", words)]
        assert len([row for row in rows if "**" in row]) == 4
