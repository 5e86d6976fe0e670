"""A disk that fills up under a run: a small tmpfs holds the run's folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import SERVES, fresh_home, make_run, process, start_node

from stackrl.runtime.run import RunFolder

pytestmark = pytest.mark.slow

FILLS = """
import os, pathlib, sys, time
filler = pathlib.Path(sys.argv[1]) / "filler"
def fill():
    with open(filler, "wb", buffering=0) as file:
        try:
            while True: file.write(b"x" * 4096)
        except OSError as error: print(error, flush=True)
fill()
for line in range(2000): print("a line that the log has no room for", line, flush=True)
"""


@pytest.fixture(autouse=True)
def _disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        with fresh_home(disk, monkeypatch):
            yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def finish(run: RunFolder) -> tuple[int, str]:
    node = start_node(run)
    output, _ = node.communicate(timeout=60)
    assert "Traceback" not in output
    return node.returncode, output


def test_a_run_outlives_a_disk_that_is_full_for_a_while() -> None:
    frees = FILLS + "time.sleep(3); filler.unlink(); time.sleep(2)"
    run = make_run(process("engine", SERVES), process("orchestrator", frees, "RUN"))
    code, output = finish(run)
    assert (code, run.state().status) == (0, "finished"), output
    log = f"{run.logs(1)}/orchestrator.log cannot be written: No space left on device"
    assert output.count(log) == 1  # told once, not for each of the lines
    assert run.state().roles == {"engine-0": "ended", "orchestrator": "done"}


def test_the_end_of_a_run_is_written_though_the_disk_is_full() -> None:
    run = make_run(process("engine", SERVES), process("orchestrator", FILLS + "sys.exit(1)", "RUN"))
    code, _ = finish(run)
    state = run.state()
    assert (code, state.status) == (1, "failed")
    assert state.reason.startswith("orchestrator ended with exit code 1: a line that the log has no room for")
    assert state.ended is not None and state.roles["engine-0"] == "ended"


def test_an_incarnation_that_cannot_be_written_is_not_begun_until_it_can() -> None:
    again = "if (pathlib.Path(sys.argv[1]) / 'again').exists(): sys.exit(0)\n"
    fills = "import pathlib, sys\n" + again + FILLS + "(filler.parent / 'again').touch()\nsys.exit(1)"
    waits = "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n" + (
        "while not (folder / 'again').exists(): time.sleep(0.05)\n"
        "time.sleep(4); (folder / 'filler').unlink(missing_ok=True)\ntime.sleep(600)"
    )
    run = make_run(
        process("engine", waits, "RUN"),
        process("trainer", fills, "RUN"),
        process("orchestrator", again.join(["import pathlib, sys, time\n", "time.sleep(600)"]), "RUN"),
        restarts=5,
    )
    code, output = finish(run)
    assert (code, run.state().status, run.state().incarnation) == (0, "finished", 2), output
    assert "cannot be started again: [Errno 28]" in run.events.read_text()


def test_an_attempt_that_cannot_begin_says_so() -> None:
    run = make_run(process("orchestrator", SERVES))
    with open(run.path / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while filler.write(b"x" * 4096):
            pass
    command = [sys.executable, "-m", "stackrl", "node", str(run.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert f"run {run.id} cannot begin: {run.path}: No space left on device" in ended.stderr
