"""Where the nodes of a run meet: node 0 listens, the others come, and what they are must fit together."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from stackrl.runtime.nodes.channel import Channel, Lost, Stranger
from stackrl.runtime.place import Place
from stackrl.runtime.run import RunError

MEETING_LIMIT = 900.0
"""Seconds that nodes wait for each other: their set-up may take unequally long."""
_FIRST_PORT, _PORT_SPAN, _PORTS = 15_000, 16_000, 8
"""Below the ports that the kernel gives to outgoing connections. A taken one is passed over."""
_RETRY_SECONDS = 0.5
_GPUS = Path("/proc/driver/nvidia/gpus")
_JOB_VARIABLES = ("STACKRL_JOB", "SKYPILOT_TASK_ID", "SLURM_HET_JOB_ID", "SLURM_JOB_ID")
"""The first of them that is set names the job that all nodes belong to."""


@dataclass(frozen=True)
class Facts:
    """What a node says of itself. Sent as it is."""

    rank: int
    nodes: int
    stack: str
    """SHA-256 of the stack file."""
    job: str
    """What the launcher calls the job that all nodes belong to."""
    version: str
    gpus: tuple[str, ...] = ()
    """Models of its GPUs, in order."""

    @classmethod
    def here(cls, place: Place, stack: str, environment: Mapping[str, str]) -> Facts:
        return cls(place.rank, place.nodes, stack, _job(environment), version("stackrl"), _gpus())


def ports(place: Place, environment: Mapping[str, str]) -> range:
    """Where node 0 may listen: the same for all nodes of a job, and others for another job."""
    key = f"{_job(environment)} {place.addresses[0]}".encode()
    first = _FIRST_PORT + zlib.crc32(key) % _PORT_SPAN
    return range(first, first + _PORTS)


def listen(place: Place, environment: Mapping[str, str]) -> socket.socket:
    """Node 0's socket, on the address that the others know it by. Raises RunError."""
    host = place.addresses[0]
    candidates = ports(place, environment)
    for port in candidates:
        try:
            listener = socket.create_server((host, port), backlog=max(128, place.nodes))
        except OSError as error:
            problem = error
            continue
        listener.setblocking(False)
        return listener
    raise RunError(
        f"node 0 cannot listen at {host} (ports {candidates[0]}-{candidates[-1]}): {problem.strerror}; "
        "is this its address on this machine?"
    )


def join(place: Place, token: str, mine: Facts, environment: Mapping[str, str], limit: float) -> Channel:
    """Find node 0 and tell it who has come. Raises RunError where it is not found within ``limit`` s."""
    host, deadline, seen = place.addresses[0], time.monotonic() + limit, ""
    candidates = ports(place, environment)
    while time.monotonic() < deadline:
        for port in candidates:
            try:
                connection = socket.create_connection((host, port), timeout=_RETRY_SECONDS * 10)
            except OSError as error:
                seen = seen or f"{error.strerror or error}"
                continue
            try:
                channel = Channel.connected(connection, f"node 0 ({host}:{port})", token)
                channel.send("hello", **asdict(mine))
                return channel
            except (Stranger, Lost) as error:
                connection.close()
                seen = str(error)
        time.sleep(_RETRY_SECONDS)
    raise RunError(
        f"node {place.rank} did not find node 0 at {host} (ports {candidates[0]}-{candidates[-1]}) within "
        f"{limit:.0f} s: {seen}; see node 0's log, and whether the nodes reach each other and have the same "
        "STACKRL_TOKEN"
    )


def differences(mine: Facts, others: Mapping[int, Facts], alike: list[list[int]]) -> list[str]:
    """Why these nodes cannot work together. ``alike``: groups of nodes that need the same GPUs."""
    found = []
    for rank, facts in sorted(others.items()):
        for name, what in (("stack", "stack file"), ("version", "version of stackrl"), ("nodes", "nodes")):
            ours, theirs = getattr(mine, name), getattr(facts, name)
            if ours != theirs:
                found.append(f"node {rank} has another {what} than node 0: {theirs}, not {ours}")
    known = {mine.rank: mine, **others}
    for group in alike:
        first, *rest = (known[rank] for rank in group)
        found += [
            f"node {one.rank} has {_words(one.gpus)}, and node {first.rank} of the same role "
            f"{_words(first.gpus)}"
            for one in rest
            if one.gpus != first.gpus
        ]
    return found


def _words(gpus: tuple[str, ...]) -> str:
    kinds = sorted(set(gpus))
    return " and ".join(f"{gpus.count(kind)} × {kind}" for kind in kinds) or "no GPUs"


def _job(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in _JOB_VARIABLES if environment.get(name)), "")


def _gpus() -> tuple[str, ...]:
    """As NVIDIA's kernel module names them; nothing where there is none."""
    found = []
    for file in sorted(_GPUS.glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in file.read_text().splitlines())
        found.append(lines.get("Model", "").strip())
    return tuple(found)
