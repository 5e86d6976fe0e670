"""The receiving end of weights over HTTP (pull.py): what is broken off goes on where it broke."""

from __future__ import annotations

import http.client
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import MessageError, Version, WeightChanges, WeightManifest, decode
from stackrl.runtime.transport.weights import WeightError, WeightsGone

SILENCE = 30.0
"""Seconds that a connection may stand still before it counts as broken."""
ATTEMPTS = 5
"""Connections in a row that may bring nothing before a receiver gives up."""
PIECE = 8 << 20
"""Bytes that are read at once."""

_M = TypeVar("_M", bound=msgspec.Struct)


class PullSource:
    """A weight server as a receiver sees it. Nothing lasts beyond ``deadline`` (time.monotonic seconds)."""

    def __init__(self, url: str, token: str, deadline: float) -> None:
        address = urlsplit(url)
        self.name, self._host, self._port = url, address.hostname or "", address.port or 80
        self._token, self._deadline = token, deadline
        self._stream: _Stream | None = None

    def __enter__(self) -> PullSource:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream:
            self._stream.close()

    def manifest(self, version: Version) -> WeightManifest:
        return self._message(f"/weights/{version}/manifest", WeightManifest, "the manifest")

    def is_whole(self, version: Version) -> bool:
        return True

    def read(self, version: Version, offset: int, view: memoryview) -> None:
        self._read(f"/weights/{version}", f"weight version {version}", offset, view)

    def changes(self, version: Version) -> WeightChanges | None:
        try:
            return self._message(f"/weights/{version}/changes/manifest", WeightChanges, "what changed")
        except (NotThere, WeightsGone):
            return None

    def read_changes(self, version: Version, offset: int, view: memoryview) -> None:
        self._read(f"/weights/{version}/changes", f"the changes to weight version {version}", offset, view)

    def _read(self, path: str, what: str, offset: int, view: memoryview) -> None:
        """Reading on where the last call ended takes no new connection."""
        if self._stream is None or (self._stream.path, self._stream.offset) != (path, offset):
            if self._stream:
                self._stream.close()
            self._stream = _Stream(self, path, what, offset)
        self._stream.readinto(view)

    def _message(self, path: str, kind: type[_M], what: str) -> _M:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                connection, response = self.open(path)
                try:
                    return decode(response.read(), kind)
                finally:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                self.pause(attempt, error, what)
            except MessageError as error:
                raise WeightError(f"{self.name}{path}: {error}") from error
        raise AssertionError("pause ends the loop")

    def open(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """GET ``path``. Raises OSError or HTTPException where the connection fails, WeightsGone and NotThere
        by the answer, and other WeightErrors."""
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
            raise WeightsGone(f"{self.name}: {reason}")
        kind = NotThere if response.status == 404 else WeightError
        raise kind(f"{self.name} answered {response.status} to GET {path}: {reason}")

    def check_deadline(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise WeightError(f"{self.name} did not give {what} in time; raise weights.timeout")

    def pause(self, attempt: int, error: Exception, what: str) -> None:
        """Wait before the next attempt, or give up. Raises WeightError."""
        self.check_deadline(what)
        if attempt >= ATTEMPTS:
            raise WeightError(f"{self.name} did not give {what} in {attempt} attempts: {error!r}") from error
        time.sleep(0.1 * 4 ** (attempt - 1))


class NotThere(WeightError):
    """Nothing is served at this address (yet)."""


class _Stream:
    """The bytes at ``path`` from ``offset`` on, read in order over as many connections as it takes."""

    def __init__(self, source: PullSource, path: str, what: str, offset: int) -> None:
        self.path, self.offset = path, offset
        self._source, self._what = source, what
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    def readinto(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. A broken connection is opened again where it broke."""
        done = fruitless = 0
        while done < view.nbytes:
            self._source.check_deadline(self._what)
            try:
                if self._response is None:
                    self._connection, self._response = self._source.open(f"{self.path}?offset={self.offset}")
                count = self._response.readinto(view[done : done + PIECE])
                if not count:
                    raise ConnectionError("the connection ended early")
                done, fruitless = done + count, 0
                self.offset += count
            except (OSError, http.client.HTTPException) as error:
                self.close()
                fruitless += 1
                self._source.pause(fruitless, error, self._what)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None
