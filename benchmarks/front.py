"""How long the front takes to answer: ``.venv/bin/python benchmarks/front.py [RUNS]``.

Every run is a new process, so that nothing is loaded before. Wall time is what a person waits; processor
time is what it takes where nothing else runs. Ends with 1 where validating glm5 takes longer than LIMIT.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.8
"""Seconds, median of the wall time."""
VERBS = (
    ("validate", "stacks/glm5.yaml"),
    ("validate", "stacks/reverse-text-cpu.yaml"),
    ("show", "stacks/glm5.yaml"),
    ("plan", "stacks/glm5.yaml"),
    ("--help",),
)


def main(runs: int) -> int:
    print(f"{runs} processes each, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {'stackrl …':<38} | median s | slowest s | processor s |\n| --- | --- | --- | --- |")
    medians = []
    for arguments in VERBS:
        walls, processors = zip(*(measure(arguments) for _ in range(runs)), strict=True)
        medians.append(statistics.median(walls))
        figures = f"{medians[-1]:.2f} | {max(walls):.2f} | {statistics.median(processors):.2f}"
        print(f"| {'`' + ' '.join(arguments) + '`':<38} | {figures} |")
    if medians[0] > LIMIT:
        print(f"validating glm5 takes {medians[0]:.2f} s, more than {LIMIT} s", file=sys.stderr)
    return int(medians[0] > LIMIT)


def measure(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall and processor seconds of one command line."""
    before, began = _processor_seconds(), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "stackrl", *arguments], cwd=ROOT, capture_output=True, check=True, timeout=120
    )
    return time.monotonic() - began, _processor_seconds() - before


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 11))
