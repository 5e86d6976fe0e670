"""Weights over HTTP: the trainer keeps the newest versions in memory, engines fetch them when they want.

    GET /weights/manifest             the newest version's manifest          404 before the first
    GET /weights/{version}/manifest   that version's manifest                410 when it is gone, 404 not yet
    GET /weights/{version}?offset=N   its tensors' bytes, in the manifest's order and without gaps, from byte
                                      N to the end

One answer carries a whole version; a receiver whose connection breaks goes on from the byte it has reached.
Joining late is the same as updating.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import torch

from stackrl.runtime.transport.auth import authorized, bearer
from stackrl.runtime.transport.messages import MessageError, Version, WeightManifest, decode, encode
from stackrl.runtime.transport.strangers import BACKLOG, SWEEP_SECONDS, Doorkeeper, FirstOfEach, many_files
from stackrl.runtime.transport.weights import (
    KEPT_VERSIONS,
    NamedTensors,
    WeightError,
    WeightsGone,
    allocate,
    as_bytes,
    check_manifest,
    snapshots,
    verify,
)

log = logging.getLogger(__name__)

PIECE = 8 << 20
"""Bytes sent between two looks at whether the version is still kept."""
SILENCE = 30.0
"""Seconds that a connection may stand still before it counts as broken."""
ATTEMPTS = 5
"""Connections in a row that may bring nothing before a receiver gives up."""


@dataclass(frozen=True)
class Snapshot:
    """One version in host memory; ``tensors`` in the manifest's order."""

    manifest: WeightManifest
    tensors: list[torch.Tensor]

    def pieces(self, offset: int) -> Iterator[memoryview]:
        """Its bytes from ``offset`` on, at most PIECE at a time, without copies."""
        for tensor in self.tensors:
            data = as_bytes(tensor)
            for start in range(min(offset, data.nbytes), data.nbytes, PIECE):
                yield data[start : start + PIECE]
            offset = max(0, offset - data.nbytes)

    @property
    def bytes(self) -> int:
        return sum(info.bytes for info in self.manifest.tensors)


class WeightStore:
    """The versions that can be fetched: the newest and the one before it, never more than two in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Version, Snapshot] = {}
        self._newest: Version | None = None

    def publish(self, version: Version, tensors: NamedTensors) -> None:
        """Copy ``tensors`` as ``version``. Raises WeightError unless it is newer than all before."""
        if self._newest is not None and version <= self._newest:
            raise WeightError(f"weight version {version} does not follow {self._newest}, which is published")
        self._forget_all_but(KEPT_VERSIONS - 1)
        infos, copies = [], []
        for info, copy in snapshots(tensors):
            infos.append(info)
            copies.append(copy)
        with self._lock:
            self._kept[version] = Snapshot(WeightManifest(version=version, tensors=infos), copies)
            self._newest = version

    def newest(self) -> Snapshot | None:
        with self._lock:
            return None if self._newest is None else self._kept[self._newest]

    def get(self, version: Version) -> Snapshot:
        """Raises WeightsGone where ``version`` was replaced, KeyError where it was never published."""
        with self._lock:
            if version in self._kept:
                return self._kept[version]
            if self._newest is not None and version < self._newest:
                raise WeightsGone(f"weight version {version} is gone, {self._newest} is the newest")
            raise KeyError(f"weight version {version} is not there, {self._newest or 'none'} is the newest")

    def _forget_all_but(self, count: int) -> None:
        with self._lock:
            for version in sorted(self._kept)[:-count]:
                del self._kept[version]


class WeightServer:
    """Serves a WeightStore on ``host:port`` from a thread; every request must show ``token``."""

    def __init__(self, store: WeightStore, host: str, port: int, token: str) -> None:
        many_files()
        self._server = _Server((host, port), _Handler)
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

    def __init__(self, host: str, port: int, token: str) -> None:
        self._store = WeightStore()
        self._server = WeightServer(self._store, host, port, token)
        self.source = self._server.url

    def publish(self, version: Version, tensors: NamedTensors) -> None:
        self._store.publish(version, tensors)

    def close(self) -> None:
        self._server.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG
    store: WeightStore
    token: str

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "stackrl", ""
    timeout = SILENCE
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        if not authorized(self.headers.get("Authorization"), self.server.token):
            if self.server.refused_first(self.client_address[0]):
                log.warning("refused %s without the run's token", self.client_address[0])
            return self._text(401, "this needs the run's token")
        self.server.doorkeeper.known(self.connection)
        address = urlsplit(self.path)
        route = re.fullmatch(r"/weights(?:/(\d+\.\d+))?(/manifest)?", address.path)
        if route is None or not any(route.groups()):
            return self._text(404, f"nothing is served at {address.path}")
        try:
            store = self.server.store
            snapshot = store.get(Version.parse(route[1])) if route[1] else store.newest()
        except WeightsGone as error:
            return self._text(410, str(error))
        except KeyError as error:
            return self._text(404, error.args[0])
        if snapshot is None:
            return self._text(404, "no weights are published yet")
        if route[2]:
            body = encode(snapshot.manifest)
            self._head(200, "application/msgpack", len(body))
            self.wfile.write(body)
            return None
        offset = parse_qs(address.query).get("offset", ["0"])[0]
        if not (offset.isdecimal() and int(offset) <= snapshot.bytes):
            return self._text(416, f"offset {offset!r} is not within {snapshot.bytes} bytes")
        return self._send(snapshot, int(offset))

    def _send(self, snapshot: Snapshot, offset: int) -> None:
        self._head(200, "application/octet-stream", snapshot.bytes - offset)
        for piece in snapshot.pieces(offset):
            try:
                self.server.store.get(snapshot.manifest.version)
            except WeightsGone:  # too slow: the receiver asks to go on and is told why it cannot
                self.close_connection = True
                return
            self.wfile.write(piece)

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


def fetch(url: str, version: Version, token: str, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``version`` from the weight server at ``url``, its hash checked, one at a time.

    Raises as ``weights.receive`` does.
    """
    source = _Source(url, token, time.monotonic() + timeout)
    manifest = source.manifest(version)
    check_manifest(manifest, version, url)
    with source.stream(version) as stream:
        for info in manifest.tensors:
            tensor = allocate(info)
            stream.readinto(as_bytes(tensor))
            verify(info, tensor, version, url)
            yield info.name, tensor


class _Source:
    """A weight server as a receiver sees it. Nothing lasts beyond ``deadline`` (time.monotonic seconds)."""

    def __init__(self, url: str, token: str, deadline: float) -> None:
        address = urlsplit(url)
        self.url, self._host, self._port = url, address.hostname or "", address.port or 80
        self._token, self._deadline = token, deadline

    def manifest(self, version: Version) -> WeightManifest:
        path = f"/weights/{version}/manifest"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                connection, response = self.open(path)
                try:
                    return decode(response.read(), WeightManifest)
                finally:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                self.pause(attempt, error, "the manifest")
            except MessageError as error:
                raise WeightError(f"{self.url}{path}: {error}") from error
        raise AssertionError("pause ends the loop")

    def stream(self, version: Version) -> _Stream:
        return _Stream(self, version)

    def open(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """GET ``path``. Raises OSError or HTTPException where the connection fails, and as ``fetch`` does."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENCE)
        try:
            connection.request("GET", path, headers=bearer(self._token))
            response = connection.getresponse()
            if response.length is None:
                raise ConnectionError("the connection ended within the answer's head")
            if response.status == 200:
                return connection, response
            reason = response.read(4096).decode(errors="replace")
        except BaseException:
            connection.close()
            raise
        connection.close()
        if response.status == 410:
            raise WeightsGone(f"{self.url}: {reason}")
        raise WeightError(f"{self.url} answered {response.status} to GET {path}: {reason}")

    def check_deadline(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise WeightError(f"{self.url} did not give {what} in time; raise weights.timeout")

    def pause(self, attempt: int, error: Exception, what: str) -> None:
        """Wait before the next attempt, or give up. Raises WeightError."""
        self.check_deadline(what)
        if attempt >= ATTEMPTS:
            raise WeightError(f"{self.url} did not give {what} in {attempt} attempts: {error!r}") from error
        time.sleep(0.1 * 4 ** (attempt - 1))


class _Stream:
    """The bytes of one version, read in order over as many connections as it takes."""

    def __init__(self, source: _Source, version: Version) -> None:
        self._source, self._version = source, version
        self._offset = 0
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def readinto(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. A broken connection is opened again where it broke."""
        done = fruitless = 0
        what = f"weight version {self._version}"
        while done < view.nbytes:
            self._source.check_deadline(what)
            try:
                if self._response is None:
                    path = f"/weights/{self._version}?offset={self._offset}"
                    self._connection, self._response = self._source.open(path)
                count = self._response.readinto(view[done : done + PIECE])
                if not count:
                    raise ConnectionError("the connection ended early")
                done, fruitless = done + count, 0
                self._offset += count
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                fruitless += 1
                self._source.pause(fruitless, error, what)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None
