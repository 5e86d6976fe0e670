"""Every listening port of a run of real servers, attacked: nobody gets in, and the run does not notice."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attacked_run
import httpx
import pytest
import strangers
from fake_roles import fresh_home, wait_until
from strangers import Customers, is_closed, send, silent_crowd

from stackrl.runtime.launch.sockets import LOOPBACK, TOKEN, Socket, ports_of
from stackrl.runtime.processes import descendants
from stackrl.runtime.run import RunFolder, all_runs
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.strangers import MOST_STRANGERS, PATIENCE

pytestmark = pytest.mark.slow

SECRET = "the-token-of-a-run-under-attack"
ROUTES = {"engine-0": "/inference/v1/generate", "orchestrator": "/hello", "trainer-0": "/weights/manifest"}
CROWD = 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    with pytest.MonkeyPatch.context() as patch, fresh_home(tmp_path_factory.mktemp("attacked"), patch):
        patch.setenv("STACKRL_TOKEN", SECRET)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield attacked_run.start()
        assert [run.keeper() is not None for run in all_runs()] == [True]


@pytest.fixture
def unharmed(run: RunFolder) -> Iterator[Customers]:
    """The run's own clients during a test; they and the processes must not notice it."""
    before = descendants(run.keeper())
    with Customers(run, SECRET) as customers:
        wait_until(lambda: len(customers.served) == 3, limit=30)
        yield customers
        served, collectives = dict(customers.served), customers.collectives
        wait_until(lambda: all(customers.served[name] > served[name] + 1 for name in served))
        wait_until(lambda: customers.collectives > collectives + 2)
    assert customers.failures == []
    assert max(customers.slowest.values()) < 15, customers.slowest
    assert descendants(run.keeper()) == before
    assert set(run.state().roles.values()) == {"running"}
    assert not run.events.exists() or "restarted" not in run.events.read_text()


def closed(run: RunFolder) -> list[Socket]:
    """Ports that want the token."""
    return [socket for socket in ports_of(run) if TOKEN in socket.protection]


def open_ports(run: RunFolder) -> list[Socket]:
    """Of libraries that cannot ask for it."""
    return [socket for socket in ports_of(run) if TOKEN not in socket.protection]


def memory(run: RunFolder) -> dict[int, int]:
    """Pid → resident KiB, of all processes of the run."""
    found = {}
    for pid in descendants(run.keeper()):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                found[pid] = int(line.split()[1])
    return found


def at_once(attack: Callable[..., None], cases: list[tuple]) -> None:
    """All ``cases``, a few at a time. Raises what the first one that fails does."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda case: attack(*case), cases))


def test_every_port_is_known_and_closed_to_other_machines(run: RunFolder) -> None:
    found = ports_of(run)
    assert [socket.warning for socket in found if socket.warning] == []
    assert {socket.purpose.split()[0] for socket in found} == {
        "requests", "batches", "weights", "meeting", "collectives"
    }  # fmt: skip
    assert {socket.process for socket in closed(run)} == {"engine-0", "orchestrator", "trainer-0"}
    assert all(LOOPBACK in socket.protection for socket in found)


def test_requests_without_the_token_are_refused(run: RunFolder, unharmed: Customers) -> None:
    def attack(port: Socket, what: str, data: bytes) -> None:
        statuses = [
            line.split()[1] for line in send(port.port, data).split(b"\r\n") if line.startswith(b"HTTP/")
        ]
        assert all(status[:1] in b"45" for status in statuses), (port, what, statuses)
        assert statuses or "behind" in what or "1 GiB" in what or "chunks" in what, (port, what)

    at_once(
        attack,
        [(port, *one) for port in closed(run) for one in strangers.requests(ROUTES[port.process]).items()],
    )


def test_bytes_that_are_no_request_do_nothing(run: RunFolder, unharmed: Customers, tmp_path: Path) -> None:
    def attack(port: Socket, what: str, data: bytes) -> None:
        said = send(port.port, data, wait=0.5)
        assert b" 200 " not in said[:20] and SECRET.encode() not in said, (port, what, said[:100])

    before, trace = memory(run), tmp_path / "trace"
    at_once(attack, [(port, *one) for port in ports_of(run) for one in strangers.garbage(trace).items()])
    assert not trace.exists()
    grown = {pid: memory(run)[pid] - kib for pid, kib in before.items()}
    assert max(grown.values()) < 200 * 1024, grown


def test_crowds_that_say_nothing_are_put_out(run: RunFolder, unharmed: Customers) -> None:
    with contextlib.ExitStack() as stack:
        crowds = [stack.enter_context(silent_crowd(port.port, CROWD)) for port in closed(run)]
        began = time.monotonic()
        wait_until(
            lambda: all(sum(map(is_closed, crowd)) >= CROWD - MOST_STRANGERS for crowd in crowds), limit=10
        )
        wait_until(lambda: all(map(is_closed, itertools.chain(*crowds))), limit=PATIENCE + 20)
        assert time.monotonic() - began > PATIENCE - 2


def test_crowds_at_the_libraries_ports_are_borne(run: RunFolder, unharmed: Customers) -> None:
    with contextlib.ExitStack() as crowds:
        for port in open_ports(run):
            crowds.enter_context(silent_crowd(port.port, CROWD))
        time.sleep(5)


def test_who_never_ends_a_request_is_put_out(run: RunFolder, unharmed: Customers) -> None:
    slow = []
    with contextlib.ExitStack() as stack:
        for port in closed(run):
            head = f"GET {ROUTES[port.process]} HTTP/1.1\r\nHost: x\r\n".encode()
            for _ in range(50):
                slow.append(stack.enter_context(socket.create_connection((strangers.HOST, port.port))))
                slow[-1].setblocking(False)
                slow[-1].send(head)
        deadline = time.monotonic() + PATIENCE + 20
        while not all(map(is_closed, slow)):
            assert time.monotonic() < deadline, "they may go on for ever"
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
            time.sleep(0.5)


def test_who_has_shown_the_token_may_be_silent(run: RunFolder, unharmed: Customers) -> None:
    """A connection that is known stays: engines answer late, and ranks wait for batches."""
    known = [
        (http.client.HTTPConnection(strangers.HOST, port.port, timeout=10), ROUTES[port.process])
        for port in closed(run)
        if port.process != "trainer-0"  # its connections are left after 30 s; receivers make new ones
    ]
    for pause in (PATIENCE + 4, 0):
        for connection, route in known:
            connection.request("POST", route, b"abc", bearer(SECRET))
            connection.getresponse().read()
            connection.auto_open = 0  # the same one, or an error
        time.sleep(pause)
    for connection, _ in known:
        connection.close()


def test_bodies_that_are_no_messages_are_refused_even_with_the_token(
    run: RunFolder, unharmed: Customers, tmp_path: Path
) -> None:
    ends = run.endpoints()
    bad = {"large": bytes(2 << 20), **strangers.garbage(tmp_path / "trace")}
    with httpx.Client(headers=bearer(SECRET), timeout=20) as client:
        for what, body in bad.items():
            for route in ("hello", "acks"):
                answer = client.post(f"{ends.orchestrator}/{route}", content=body)
                assert answer.status_code in (400, 413), (what, answer)
        assert client.post(f"{ends.orchestrator}/hello", content=bad["large"]).status_code == 413
        assert client.get(f"{ends.weights}/weights/../../etc/passwd").status_code == 404
        assert client.get(f"{ends.weights}/weights/manifest?offset=-1").status_code == 200
        assert client.post(f"{ends.weights}/weights/manifest", content=b"x").status_code == 501
    assert not (tmp_path / "trace").exists()
