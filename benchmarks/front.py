"""How long the front takes to answer: ``.venv/bin/python benchmarks/front.py [RUNS]``.

Every run is a new process, so that nothing is loaded before; the modules are compiled, as they are after the
first run of an installation. Wall time is what a person waits; processor time is what it takes where nothing
else runs. Ends with 1 where one of LIMITED takes longer than LIMIT.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.8
"""Seconds, median of the wall time; where more processes than cores want to run, of the processor time."""
LIMITED = (("validate", "stacks/glm5.yaml"), ("plan", "stacks/glm5.yaml"))
VERBS = (
    *LIMITED,
    ("validate", "stacks/reverse-text-cpu.yaml"),
    ("plan", "stacks/reverse-text-cpu.yaml"),
    ("show", "stacks/glm5.yaml"),
    ("--help",),
)


def main(runs: int) -> int:
    with tempfile.TemporaryDirectory() as compiled:
        return measure_all(runs, compiled)


def measure_all(runs: int, compiled: str) -> int:
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    print(f"{runs} processes each, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {'stackrl …':<38} | median s | slowest s | processor s |\n| --- | --- | --- | --- |")
    failed = False
    for arguments in VERBS:
        measure(arguments, compiled)
        walls, processors = zip(*(measure(arguments, compiled) for _ in range(runs)), strict=True)
        wall, processor = statistics.median(walls), statistics.median(processors)
        figures = f"{wall:.2f} | {max(walls):.2f} | {processor:.2f}"
        print(f"| {'`' + ' '.join(arguments) + '`':<38} | {figures} |", flush=True)
        seconds = processor if busy else wall
        if arguments in LIMITED and seconds > LIMIT:
            print(f"`{' '.join(arguments)}` takes {seconds:.2f} s, more than {LIMIT} s", file=sys.stderr)
            failed = True
    return int(failed)


def measure(arguments: tuple[str, ...], compiled: str) -> tuple[float, float]:
    """Wall and processor seconds of one command line. ``compiled``: folder of the compiled modules."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = _processor_seconds(), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "stackrl", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return time.monotonic() - began, _processor_seconds() - before


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 11))
