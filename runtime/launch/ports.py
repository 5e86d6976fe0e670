"""Free TCP ports for the sockets of a run."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 15_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports that nobody listens on at ``host``.

    Taken from below the range from which the kernel gives ports to outgoing connections, so that none is
    taken by chance between this call and the moment its owner binds it. Raises OSError when none are left.
    """
    candidates = list(range(_LOWEST, _first_ephemeral()))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            if not candidates:
                raise OSError(f"no {count} free ports at {host} between {_LOWEST} and {_first_ephemeral()}")
            port = candidates.pop()
            candidate = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                candidate.bind((host, port))
            except OSError:
                continue
            found.append(port)
    return found


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except OSError:
        first = 32_768
    return first if first > _LOWEST + 1000 else 32_768
