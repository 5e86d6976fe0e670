"""`stackrl ports`: every TCP port that a run listens on, and what keeps strangers out (Linux)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from stackrl.runtime.heartbeat import PROCESS_VARIABLE
from stackrl.runtime.launch.backends import LOCAL, at_work
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.processes import descendants, parent_of
from stackrl.runtime.run import Endpoints, RunError, RunFolder, find_run

TOKEN = "the run's token"
LOOPBACK = "this machine only"
INTERFACE = "the declared interface only"
NOTHING = "nothing"
_LISTENING = "0A"


@dataclass(frozen=True)
class Socket:
    """A listening socket. ``process`` is the run's process that opened it, ``pid`` the one that holds it."""

    address: str
    port: int
    process: str
    pid: int
    purpose: str
    protection: str
    warning: str
    """What a person should look at; empty where all is well."""


@dataclass(frozen=True)
class Purpose:
    """What a socket of ours or of a library is for. ``closed``: whether it wants the run's token."""

    text: str
    closed: bool


MEETING = Purpose("meeting of the nodes (nonces that the token answers)", True)


def show(name: str, output: str) -> int:
    """Print the listening ports of the run called ``name``. 0: each is protected, 1: one is not."""
    run = find_run(name)
    found = ports_of(run)
    if output == "json":
        print(json.dumps([asdict(socket) for socket in found], indent=1))
    else:
        print(_table(found) if found else f"run {run.id} listens on no port yet")
    return 1 if any(socket.warning for socket in found) else 0


def ports_of(run: RunFolder) -> list[Socket]:
    """Every listening TCP socket of the run's processes, by port. Raises RunError where it is not running."""
    if (root := run.keeper()) is None:
        if Handle.of(run).backend != LOCAL and at_work(run):
            there = f"`stackrl exec {run.id} -- stackrl ports {run.id}`"
            raise RunError(f"run {run.id} listens on the machines where it is; its first node tells: {there}")
        raise RunError(
            f"run {run.id} is not running, so it listens on no port; see `stackrl status {run.id}`"
        )
    file = run.path / "endpoints.json"
    known = _known(run.endpoints()) if file.exists() else {}
    return [
        _judged(address, port, pid, _process_of(pid, root), known)
        for address, port, pid in sorted(
            listening([root, *descendants(root)]), key=lambda found: (found[1], found[0])
        )
    ]


def listening(pids: Iterable[int]) -> list[tuple[str, int, int]]:
    """Address, port and pid of every TCP socket that one of ``pids`` listens on.

    One that several hold (a child inherits its parent's) counts for the first of ``pids``.
    """
    sockets: dict[str, tuple[str, int]] = {}
    found: dict[str, tuple[str, int, int]] = {}
    for pid in pids:
        if not sockets:  # of the network that these processes live in
            sockets = _table_of_sockets(pid)
        for inode in _open_sockets(pid):
            if inode in sockets and inode not in found:
                found[inode] = (*sockets[inode], pid)
    return list(found.values())


def _table_of_sockets(pid: int) -> dict[str, tuple[str, int]]:
    """Inode → address and port of all that listen in the network namespace of ``pid``."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:  # no IPv6 here, or the process has ended
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                found[fields[9]] = (_address(address), int(port, 16))
    return found


def _address(text: str) -> str:
    """The kernel writes addresses as words of 32 bits in the machine's own (little-endian) order."""
    words = bytes.fromhex(text)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _open_sockets(pid: int) -> Iterator[str]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or belongs to somebody else
        return
    for entry in entries:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def _known(endpoints: Endpoints) -> dict[int, Purpose]:
    """Port → what the run gave it out for."""
    known = {
        urlsplit(endpoints.orchestrator).port: Purpose("batches from the orchestrator", True),
        urlsplit(endpoints.weights).port: Purpose("weights from the trainer", True),
        int(endpoints.rendezvous.rpartition(":")[2] or 0): Purpose("meeting of the ranks (TCPStore)", False),
    }
    for index, url in enumerate(endpoints.engines):
        if not url:
            continue
        known[urlsplit(url).port] = Purpose(f"requests to engine {index} (HTTP)", True)
    return known


def _judged(address: str, port: int, pid: int, process: str, known: dict[int, Purpose]) -> Socket:
    purpose = known.get(port) or (MEETING if process == "node" else _of_a_library(process))
    where = ip_address(address)
    if where.is_loopback:
        reach = LOOPBACK
    elif where.is_unspecified:
        reach = ""
    else:
        reach = INTERFACE
    closed = purpose is not None and purpose.closed
    protection = ", ".join(filter(None, (TOKEN if closed else "", reach))) or NOTHING
    warning = ""
    if where.is_unspecified:
        warning = "it listens on every interface of this machine"
    elif purpose is None:
        warning = "nobody knows what it is for"
    return Socket(address, port, process, pid, purpose.text if purpose else "unknown", protection, warning)


def _of_a_library(process: str) -> Purpose | None:
    """Sockets whose ports libraries choose themselves; none of them can ask for a token."""
    if process.startswith("trainer"):
        return Purpose("collectives of the ranks (gloo, NCCL)", False)
    if process.startswith("engine"):
        return Purpose("between the processes of the engine (vLLM)", False)
    return None


def _process_of(pid: int, root: int) -> str:
    """The run's process that ``pid`` belongs to, which its descendants inherit in their environment.

    A process that gives itself a title (vLLM's do) writes over the environment that the kernel shows; it
    belongs to the nearest parent that still has one.
    """
    while pid not in (0, 1, root):
        if named := _variable(pid, PROCESS_VARIABLE):
            return named
        pid = parent_of(pid)
    return "node" if pid == root else "unknown"


def _variable(pid: int, name: str) -> str:
    """An environment variable that ``pid`` was started with; empty where it cannot be read."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    wanted = f"{name}=".encode()
    named = (entry.removeprefix(wanted).decode() for entry in environment if entry.startswith(wanted))
    return next(named, "")


def _table(found: list[Socket]) -> str:
    rows = [("PORT", "ADDRESS", "PROCESS", "PURPOSE", "CLOSED BY")]
    rows += [
        (str(socket.port), socket.address, socket.process, socket.purpose, socket.protection)
        for socket in sorted(found, key=lambda socket: (socket.process, socket.port))
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [
        f"warning: port {socket.port} of {socket.process} at {socket.address}: {socket.warning}"
        for socket in found
        if socket.warning
    ]
    return "\n".join(lines)
