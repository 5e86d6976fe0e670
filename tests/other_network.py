"""A network namespace beside this machine's, joined by a cable: what strangers on another host can reach.

`python other_network.py` is the stranger's program, which runs in there (see `Network`).
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NETWORKS = ipaddress.ip_network("198.18.0.0/16")
"""Addresses for benchmarks, which no real network has. Each cable takes four."""
WAIT = 10.0
"""Seconds for one answer."""


@dataclass(frozen=True)
class Network:
    """The two ends of the cable; the stranger sends everything through it."""

    name: str
    here: str
    there: str

    def ask(self, port: int, requests: Sequence[tuple[str, str, str]]) -> list[str]:
        """What strangers hear from ``port`` at this end of the cable: to each method, path and Authorization
        header ("": none) a status, or the name of the error."""
        return self._run("answers", [(self.here, port, *request) for request in requests])

    def reached(self, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of ``places``, hosts and ports, that take a stranger's connection."""
        taken = self._run("taken", places)
        return [place for place, is_taken in zip(places, taken, strict=True) if is_taken]

    def _run(self, what: str, orders: Sequence[tuple]) -> list:
        line = ["ip", "netns", "exec", self.name, sys.executable, "-I", __file__, what]
        limit = 30 + WAIT * len(orders)
        done = subprocess.run(
            line, input=json.dumps(orders), capture_output=True, text=True, timeout=limit, check=True
        )
        return json.loads(done.stdout)


@contextmanager
def other_network() -> Iterator[Network]:
    """Make it, and take it away again. Skips the test where that is not allowed."""
    import pytest

    number = os.getpid() % (NETWORKS.num_addresses // 4)
    here, there = (str(NETWORKS[4 * number + end]) for end in (1, 2))
    name, cable = f"stackrl-{os.getpid()}", f"sr{os.getpid()}"
    with ExitStack() as ends:
        try:
            _ip("netns", "add", name)
            ends.callback(_ip, "netns", "delete", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", name)
            ends.callback(_ip, "link", "delete", cable)
            _ip("address", "add", f"{here}/30", "dev", cable)
            _ip("link", "set", cable, "up")
            _ip("-n", name, "address", "add", f"{there}/30", "dev", "cable")
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "route", "add", "default", "via", here)
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"this needs the right to make network namespaces: {why.strip()}")
        yield Network(name, here, there)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=True)


def _answer(host: str, port: int, method: str, path: str, header: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=WAIT)
    try:
        connection.request(method, path, headers={"Authorization": header} if header else {})
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def _is_taken(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=WAIT).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    act = {"answers": _answer, "taken": _is_taken}[sys.argv[1]]
    print(json.dumps([act(*order) for order in json.load(sys.stdin)]))
