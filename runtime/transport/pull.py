"""Weights over HTTP: the trainer keeps the newest versions in memory, engines fetch them when they want.

    GET /weights/manifest                     the newest version's manifest   404 before the first
    GET /weights/{version}/manifest           that version's manifest         410 when it is gone, 404 not yet
    GET /weights/{version}?offset=N           its tensors' bytes from byte N to the end, in the manifest's
                                              order and without gaps
    GET /weights/{version}/changes/manifest   what changed since the version before   404 where it is not kept
    GET /weights/{version}/changes?offset=N   its bytes, likewise

One answer carries a whole version; a receiver whose connection breaks goes on from the byte it has reached,
and one that needs single chunks asks from there and hangs up. Joining late is the same as updating.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from stackrl.runtime.transport.auth import authorized
from stackrl.runtime.transport.messages import Version, encode
from stackrl.runtime.transport.store import Changes, Snapshot, WeightStore
from stackrl.runtime.transport.strangers import BACKLOG, SWEEP_SECONDS, Doorkeeper, FirstOfEach, many_files
from stackrl.runtime.transport.weights import NamedTensors, Published, WeightsGone

log = logging.getLogger(__name__)

SILENCE = 30.0
"""Seconds that a connection may stand still before it counts as broken."""


class WeightServer:
    """Serves a WeightStore on ``host:port`` from a thread; every request must show ``token``.

    ``handler`` makes what answers a connection, as socketserver's servers do: by default a WeightHandler.
    """

    def __init__(
        self,
        store: WeightStore,
        host: str,
        port: int,
        token: str,
        handler: Callable[..., WeightHandler] | None = None,
    ) -> None:
        many_files()
        self._server = _Server((host, port), handler or WeightHandler)
        self._server.store, self._server.token = store, token
        self.url = "http://{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="weight-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


class PullPublisher:
    """Publishes into a store that a server in this process gives out."""

    def __init__(self, host: str, port: int, token: str, *, delta: bool = False) -> None:
        """``delta``: give out what changed too."""
        self._store = WeightStore(delta=delta)
        self._server = WeightServer(self._store, host, port, token)
        self.source = self._server.url

    def publish(self, version: Version, tensors: NamedTensors) -> Published:
        return self._store.publish(version, tensors)

    def close(self) -> None:
        self._server.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG
    store: WeightStore
    token: str

    def __init__(self, address: tuple[str, int], handler: Callable[..., WeightHandler]) -> None:
        super().__init__(address, handler)
        self.doorkeeper = Doorkeeper()
        self.refused_first = FirstOfEach()
        self._swept = 0.0

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        self.doorkeeper.arrived(request, lambda: _hang_up(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.doorkeeper.left(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            self.doorkeeper.sweep()


def _hang_up(connection: socket.socket) -> None:
    """Wakes the thread that waits for more of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class WeightHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection to a WeightServer."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "stackrl", ""
    timeout = SILENCE
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        if not self.admitted():
            return None
        address = urlsplit(self.path)
        route = re.fullmatch(r"/weights(?:/(\d+\.\d+))?(/changes)?(/manifest)?", address.path)
        if route is None or not (route[1] or (route[3] and not route[2])):
            return self._text(404, f"nothing is served at {address.path}")
        try:
            found = self._found(route[1], changes=bool(route[2]))
        except WeightsGone as error:
            return self._text(410, str(error))
        except KeyError as error:
            return self._text(404, error.args[0])
        if route[3]:
            body = encode(found.manifest)
            self._head(200, "application/msgpack", len(body))
            self.wfile.write(body)
            return None
        offset = parse_qs(address.query).get("offset", ["0"])[0]
        if not (offset.isdecimal() and int(offset) <= found.bytes):
            return self._text(416, f"offset {offset!r} is not within {found.bytes} bytes")
        return self._send(found, int(offset))

    def _found(self, version: str | None, changes: bool) -> Snapshot | Changes:
        """Raises as WeightStore.get does."""
        store = self.server.store
        if version:
            return store.changes(Version.parse(version)) if changes else store.get(Version.parse(version))
        if (newest := store.newest()) is None:
            raise KeyError("no weights are published yet")
        return newest

    def _send(self, found: Snapshot | Changes, offset: int) -> None:
        self._head(200, "application/octet-stream", found.bytes - offset)
        for piece in found.pieces(offset):
            if isinstance(found, Snapshot):
                try:
                    self.server.store.get(found.manifest.version)
                except WeightsGone:  # too slow: the receiver asks to go on and is told why it cannot
                    self.close_connection = True
                    return
            self.wfile.write(piece)

    def admitted(self) -> bool:
        """Whether the request shows the run's token; where it does not, it has its answer."""
        if authorized(self.headers.get("Authorization"), self.server.token):
            self.server.doorkeeper.known(self.connection)
            return True
        if self.server.refused_first(self.client_address[0]):
            log.warning("refused %s without the run's token", self.client_address[0])
        self.close_connection = True  # a body that it may have sent is not read
        self._text(401, "this needs the run's token")
        return False

    def _text(self, status: int, reason: str) -> None:
        body = reason.encode()
        self._head(status, "text/plain; charset=utf-8", len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            log.debug("a receiver of weights at %s left in the middle", self.client_address[0])

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.client_address[0], format % args)
