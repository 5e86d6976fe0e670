"""Listening sockets as the kernel lists them, and what is said of them. A whole run's: tests/security."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_roles import SERVES, fresh_home, make_run, process, start_node, wait_until

from stackrl.runtime.launch import sockets
from stackrl.runtime.launch.sockets import listening
from stackrl.runtime.run import Endpoints, RunError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize(
    ("family", "bound", "shown"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.1.2.3", "127.1.2.3"),
        (socket.AF_INET, "0.0.0.0", "0.0.0.0"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "::"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_addresses_are_read_as_they_were_bound(family: int, bound: str, shown: str) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        try:
            listener.bind((bound, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        assert listening([os.getpid()]) == []
        listener.listen()
        port = listener.getsockname()[1]
        assert listening([os.getpid()]) == [(shown, port, os.getpid())]
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(shown, shown)
        client = stack.enter_context(socket.create_connection((reached, port)))
        assert client and len(listening([os.getpid()])) == 1  # a connection is no listener


OPENS = """
import socket, subprocess, sys, time
from stackrl.runtime.run import RunFolder
run = RunFolder(sys.argv[1])
mine = socket.create_server(("127.0.0.1", int(run.endpoints().orchestrator.rpartition(":")[2])))
stray = socket.create_server((sys.argv[2], 0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[mine.fileno()])
(run.path / "opened").write_text(str(stray.getsockname()[1]))
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "protection", "warning"),
    [
        ("127.0.0.1", "this machine only", "nobody knows what it is for"),
        ("0.0.0.0", "nothing", "it listens on every interface of this machine"),
    ],
)
def test_ports_name_process_purpose_and_what_is_wrong(
    address: str, protection: str, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(process("orchestrator", OPENS, "RUN", address), process("engine", SERVES))
    start_node(run)
    stray = int(wait_until(lambda: (run.path / "opened").exists() and (run.path / "opened").read_text()))
    found = {found.port: found for found in sockets.ports_of(run)}
    port = int(run.endpoints().orchestrator.rpartition(":")[2])
    assert found.keys() == {port, stray}
    known = found[port]
    assert (known.process, known.purpose) == ("orchestrator", "batches from the orchestrator")
    assert (known.protection, known.warning) == ("the run's token, this machine only", "")
    assert (found[stray].protection, found[stray].warning) == (protection, warning)
    assert sockets.show(run.id, "text") == 1
    told = capsys.readouterr().out
    assert f"warning: port {stray} of orchestrator at {address}: {warning}" in told
    assert sockets.show(run.id, "json") == 1
    assert json.loads(capsys.readouterr().out) == [asdict(found[port]) for port in sorted(found)]


def test_sockets_of_libraries_are_told_by_their_process() -> None:
    ends = Endpoints("http://h:1", "http://h:2", ["http://h:3", "http://h:4"], "h:5")
    known = sockets._known(ends)
    assert {port: (what.text.split()[0], what.closed) for port, what in known.items()} == {
        1: ("batches", True), 2: ("weights", True), 3: ("requests", True), 4: ("requests", True),
        5: ("meeting", False),
    }  # fmt: skip
    assert sockets._of_a_library("trainer-3").text.startswith("collectives")
    assert sockets._of_a_library("engine-0").text.startswith("between the processes of the engine")
    assert sockets._of_a_library("orchestrator") is None


UNNAMED = """
import os, subprocess, sys, time
code = (
    "import pathlib, socket, subprocess, sys, time\\n"
    "if sys.argv[2]:\\n"
    "    subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1], ''], env={})\\n"
    "listener = socket.create_server(('127.0.0.1', 0))\\n"
    "print(listener.getsockname()[1], file=open(sys.argv[1], 'a'), flush=True)\\n"
    "time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", code, sys.argv[1] + "/opened", code], env={})
time.sleep(600)
"""


def test_who_has_no_environment_to_show_belongs_to_its_parents_process() -> None:
    """vLLM's processes give themselves titles, which overwrites what the kernel shows of it."""
    run = make_run(process("orchestrator", SERVES), process("engine", UNNAMED, "RUN"))
    start_node(run)
    wait_until(lambda: (run.path / "opened").exists() and len((run.path / "opened").read_text().split()) == 2)
    ports = {int(port) for port in (run.path / "opened").read_text().split()}
    found = [one for one in sockets.ports_of(run) if one.port in ports]
    assert len(found) == 2 and {one.process for one in found} == {"engine-0"}
    assert {one.purpose for one in found} == {"between the processes of the engine (vLLM)"}
    assert [one.warning for one in found] == ["", ""]


def test_a_run_that_does_not_run_has_no_ports() -> None:
    run = make_run()
    with pytest.raises(RunError, match="is not running, so it listens on no port"):
        sockets.show(run.id, "text")
