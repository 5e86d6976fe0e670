"""Connections that do not show the run's token are closed soon, and only so many may wait.

A server tells its doorkeeper of every connection that arrives, of every request that showed the token, and of
every connection that left. Silence, a request that never ends and a thousand connections at once are then all
the same: strangers, whose oldest goes first. Those who have shown the token once are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from aiohttp.http_exceptions import HttpProcessingError

PATIENCE = 10.0
"""Seconds that a connection has to show the token."""
MOST_STRANGERS = 512
"""Connections that may wait from one sweep to the next without having shown it."""
MOST_AT_ONCE = 2048
"""The same between two sweeps; one more puts the oldest out at once."""
SWEEP_SECONDS = 1.0
BACKLOG = 1024
"""Connections that the kernel holds until they are taken."""
_MOST_NAMED = 100


@dataclass
class _Stranger:
    since: float
    put_out: Callable[[], None]
    seen: bool = False
    """By an earlier sweep: the server has had time to read what it was sent."""
    overdue: bool = False


class Doorkeeper:
    """Of one server. Thread-safe; ``put_out`` closes a connection and may be called from any thread."""

    def __init__(self, most: int = MOST_STRANGERS, patience: float = PATIENCE) -> None:
        self._most, self._patience = most, patience
        self._lock = threading.Lock()
        self._strangers: dict[Hashable, _Stranger] = {}
        """In the order of their arrival."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that sweeps."""

    def arrived(self, connection: Hashable, put_out: Callable[[], None]) -> None:
        """A connection, which is a stranger's until ``known``."""
        with self._lock:
            self._strangers[connection] = _Stranger(time.monotonic(), put_out)
            over = list(self._strangers)[: max(0, len(self._strangers) - MOST_AT_ONCE)]
            leaving = [self._strangers.pop(oldest) for oldest in over]
        for stranger in leaving:
            stranger.put_out()

    def known(self, connection: Hashable) -> None:
        """It has shown the token."""
        with self._lock:
            self._strangers.pop(connection, None)

    left = known
    """It was closed by whomever."""

    def sweep(self) -> None:
        """Put out whose time is over, and the oldest of too many. Call it about every SWEEP_SECONDS.

        Nobody goes at the first look: a server that was busy for a while has not read yet what it was sent.
        """
        now = time.monotonic()
        with self._lock:
            seen = [key for key, stranger in self._strangers.items() if stranger.seen]
            leaving = set(seen[: max(0, len(self._strangers) - self._most)])
            leaving.update(key for key in seen if self._strangers[key].overdue)
            put_out = [self._strangers.pop(key).put_out for key in leaving]
            for stranger in self._strangers.values():
                stranger.seen, stranger.overdue = True, now - stranger.since > self._patience
        for close in put_out:
            close()

    def keep_sweeping(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sweep from ``loop`` for as long as it runs. A further call for it does nothing."""
        if self._loop is not loop:
            self._loop = loop
            self._sweep_in(loop)

    def _sweep_in(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            self.sweep()
            loop.call_later(SWEEP_SECONDS, self._sweep_in, loop)


class FirstOfEach:
    """Whether a refusal is worth a line in the log: the first one of each host, up to a limit."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()

    def __call__(self, host: str) -> bool:
        if host in self._hosts or len(self._hosts) >= _MOST_NAMED:
            return False
        self._hosts.add(host)
        return True


def many_files() -> int:
    """Let this process have as many connections as the machine allows. Returns how many files it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def peer(transport: asyncio.BaseTransport | None) -> Hashable:
    """What a doorkeeper calls a connection of an event loop: its peer's address and port."""
    return transport and transport.get_extra_info("peername")


async def listen(
    make: Callable[[], asyncio.Protocol], host: str | None, port: int | None, doorkeeper: Doorkeeper
) -> asyncio.Server:
    """Serve ``make``'s protocols at ``host:port`` behind ``doorkeeper``. Raises OSError where it is taken."""
    loop = asyncio.get_running_loop()
    doorkeeper.keep_sweeping(loop)
    return await loop.create_server(lambda: _Watched(make(), doorkeeper), host, port, backlog=BACKLOG)


class _Watched(asyncio.Protocol):
    """A protocol whose connection a doorkeeper knows of."""

    def __init__(self, inner: asyncio.Protocol, doorkeeper: Doorkeeper) -> None:
        self._inner, self._doorkeeper = inner, doorkeeper
        self.data_received, self.eof_received = inner.data_received, inner.eof_received
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = peer(transport)
        self._doorkeeper.arrived(self._peer, transport.abort)
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._doorkeeper.left(self._peer)
        self._inner.connection_lost(error)


def told_in_a_line(record: logging.LogRecord) -> bool:
    """A filter for aiohttp's logger: what is no HTTP is a stranger's fault, whose traceback nobody needs."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = f"{record.getMessage()}: {str(error).splitlines()[0]}", ()
        record.exc_info = None
    return True
