"""The benchmark of weights brings versions to a real engine in every way there is."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stacks

pytestmark = pytest.mark.nightly


def test_it_says_what_each_transport_takes() -> None:
    script = stacks.ROOT / "benchmarks" / "weights.py"
    done = subprocess.run(
        [sys.executable, script, "--small", "--engines", "1", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    rows = {row[0]: row for row in cells if len(row) > 1 and row[1] == "1"}
    assert set(rows) == {"pull", "pull, delta", "folder", "folder, delta", "collective"}
    for name, (_, _, whole, sent, *seconds) in rows.items():
        assert (float(sent) < float(whole)) == ("delta" in name)
        assert all(float(figure) >= 0 for figure in seconds)
