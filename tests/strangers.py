"""What strangers do to a port, and what a run's own clients find meanwhile."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import attacked_run
import httpx

from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import Hello, Version, encode
from stackrl.runtime.transport.weights import receive

HOST = "127.0.0.1"
GIBIBYTE = 1 << 30


class Exploit:
    """Unpickled, it makes a file: whoever finds it there has been had."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._file),)


def garbage(trace: Path) -> dict[str, bytes]:
    """Bytes that are no request. ``trace`` must not be there afterwards."""
    random = Random(7)
    bomb = pickle.dumps(Exploit(trace))
    filling = random.randbytes(1 << 16)
    return {
        "pickle": bomb,
        "pickle behind its length": struct.pack(">Q", len(bomb)) + bomb,
        "1 GiB announced, 4 bytes, big-endian": struct.pack(">I", GIBIBYTE) + filling,
        "1 GiB announced, 4 bytes, little-endian": struct.pack("<I", GIBIBYTE) + filling,
        "1 GiB announced, 8 bytes": struct.pack("<Q", GIBIBYTE) + filling,
        "1 GiB announced by msgpack": b"\xc6" + struct.pack(">I", GIBIBYTE) + filling,
        **{f"random bytes {n}": random.randbytes(1 << random.randrange(4, 16)) for n in range(8)},
        "zeros": bytes(1 << 16),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + filling,
        "TLS": bytes.fromhex("16030100c8010000c40303") + filling,
        "a line that never ends": b"GET /" + b"a" * (1 << 20),
        "headers without end": b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 50_000,
        "a negative length": b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
        "a length of letters": b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\nhello",
    }


def requests(route: str) -> dict[str, bytes]:
    """Whole requests for a real route, none of which shows the run's token."""
    get = f"GET {route} HTTP/1.1\r\nHost: x\r\n".encode()
    post = f"POST {route} HTTP/1.1\r\nHost: x\r\n".encode()
    hidden = get + b"\r\n"
    return {
        "no token": get + b"\r\n",
        "an empty token": get + b"Authorization: Bearer \r\n\r\n",
        "a wrong token": get + b"Authorization: Bearer wrong-wrong-wrong-wrong\r\n\r\n",
        "another scheme": get + b"Authorization: Basic d3Jvbmc6d3Jvbmc=\r\n\r\n",
        "a token of bytes": get + b"Authorization: Bearer \xff\xfe\xfd\r\n\r\n",
        "1 GiB announced": post + f"Content-Length: {GIBIBYTE}\r\n\r\n".encode() + bytes(1 << 20),
        "a request behind chunks": post
        + f"Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
        + hidden,
        "two lengths": post + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello" + hidden,
        "chunks of bad size": post + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + hidden,
        "requests one behind the other": hidden * 50,
        "an upgrade": get + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    }


def send(port: int, data: bytes, wait: float = 1.0) -> bytes:
    """What the port says to ``data``, until it has said nothing for ``wait`` seconds or hung up."""
    said = b""
    with socket.create_connection((HOST, port), timeout=10) as connection:
        with contextlib.suppress(OSError):  # it may hang up in the middle
            connection.settimeout(5)
            connection.sendall(data)
        connection.settimeout(wait)
        with contextlib.suppress(OSError):
            while piece := connection.recv(1 << 16):
                said += piece
    return said


@contextlib.contextmanager
def silent_crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """``count`` connections that say nothing; non-blocking, for there may be no room for all of them."""
    crowd = []
    for _ in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect((HOST, port))
        crowd.append(stranger)
    try:
        yield crowd
    finally:
        for stranger in crowd:
            stranger.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has hung up."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass
class Customers:
    """The run's own clients: each asks again and again on fresh connections. Use as a context."""

    run: RunFolder
    token: str
    failures: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Customers:
        self._leave = threading.Event()
        self._steps = attacked_run.steps(self.run)
        customers = (self._engine, self._orchestrator, self._weights)
        self._threads = [threading.Thread(target=self._ask, args=(customer,)) for customer in customers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join(timeout=60)

    @property
    def collectives(self) -> int:
        """That the trainer's ranks have done since this began."""
        return attacked_run.steps(self.run) - self._steps

    def _ask(self, customer) -> None:
        name = customer.__name__.strip("_")
        while not self._leave.wait(0.2):
            began = time.monotonic()
            try:
                customer()
                self.served[name] = self.served.get(name, 0) + 1
            except Exception as error:
                self.failures.append(f"{name}: {error!r}")
            self.slowest[name] = max(self.slowest.get(name, 0.0), time.monotonic() - began)

    def _engine(self) -> None:
        url = f"{self.run.endpoints().engines[0]}/inference/v1/generate"
        answer = httpx.post(url, content=b"x" * 1000, headers=bearer(self.token), timeout=20)
        assert answer.json() == {"bytes": 1000}

    def _orchestrator(self) -> None:
        incarnation = self.run.state().incarnation
        hello = Hello(
            incarnation=incarnation,
            rank=0,
            ranks=attacked_run.RANKS,
            index=0,
            version=Version(incarnation, 0),
        )
        url = f"{self.run.endpoints().orchestrator}/hello"
        answer = httpx.post(url, content=encode(hello), headers=bearer(self.token), timeout=20)
        assert answer.is_success, answer.text

    def _weights(self) -> None:
        [(name, tensor)] = receive(
            self.run.endpoints().weights, Version(self.run.state().incarnation, 0), self.token, 20
        )
        assert name == "weight" and tensor.sum() == 1 << 18
