"""`stackrl report`, and the report that is written at the end of every run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stackrl.runtime import processes
from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder, find_run, open_private

LIMIT = 120.0
"""Seconds that the report at the end of a run may take."""
_PROGRAM = (
    "import sys; from stackrl.runtime.monitor.report import write_report; "
    "from stackrl.runtime.run import RunFolder; write_report(RunFolder(sys.argv[1]))"
)


def report(name: str, output: str | None) -> int:
    """Write the report of the run called ``name`` and print where it is."""
    from stackrl.runtime.monitor.report import write_report

    run = find_run(name)
    print(write_report(run, Path(output) if output else None))
    return 0


def write_report_aside(run: RunFolder) -> None:
    """Write the report in a process of its own, for LIMIT seconds at most; a run never fails of it.

    What went wrong is in logs/report.log. The process does not know the run's token.
    """
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    parent = os.getpid()
    try:
        with open(run.path / "logs" / "report.log", "ab", opener=open_private) as log:
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=LIMIT,
                env=environment,
                preexec_fn=lambda: processes.die_with(parent),
                check=False,
            )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the report of run {run.id} was not written: {error}", file=sys.stderr)
