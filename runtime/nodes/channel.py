"""Messages between node 0 and another node: msgpack maps in frames, on a socket that the run's token opens.

Both sides prove that they know the token before either listens to the other, and neither sends it: each
answers the other's nonce, and the port that it sees itself at, with its HMAC-SHA256. Whoever relays the
proofs from another port is found out.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from msgspec import MsgspecError, msgpack

HANDSHAKE_LIMIT = 5.0
"""Seconds that a stranger may take to prove nothing."""
SEND_LIMIT = 20
"""Seconds after which a node that takes no message is lost."""
_LARGEST = 64 << 20
_LENGTH = struct.Struct("!I")
_NONCE, _PROOF = 32, 32
_CHUNK = 1 << 16


class Lost(Exception):
    """The other side has gone, or does not answer."""


class Stranger(Exception):
    """The other side does not know the run's token."""


class Channel:
    """One end of a connection between two nodes."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self.peer = connection, peer
        self._arrived = bytearray()
        connection.settimeout(None)  # the kernel's own limit, for Python's makes every call wait
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def accepted(cls, connection: socket.socket, peer: str, token: str) -> Channel:
        """The side of node 0. Raises Stranger and Lost."""
        mine, deadline = secrets.token_bytes(_NONCE), time.monotonic() + HANDSHAKE_LIMIT
        try:
            port = connection.getsockname()[1]
            connection.settimeout(HANDSHAKE_LIMIT)
            connection.sendall(mine)
            answer = _read(connection, _NONCE + _PROOF, deadline)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _prove(token, b"node", port, mine, theirs)):
                raise Stranger(f"{peer} does not know the run's token")
            connection.sendall(_prove(token, b"node 0", port, theirs, mine))
        except OSError as error:
            raise Lost(f"{peer}: {error}") from error
        return cls(connection, peer)

    @classmethod
    def connected(cls, connection: socket.socket, peer: str, token: str) -> Channel:
        """The side of the others. Raises Stranger and Lost."""
        mine, deadline = secrets.token_bytes(_NONCE), time.monotonic() + HANDSHAKE_LIMIT
        try:
            port = connection.getpeername()[1]
            theirs = _read(connection, _NONCE, deadline)
            connection.sendall(mine + _prove(token, b"node", port, theirs, mine))
            proof = _read(connection, _PROOF, deadline)
        except Lost as lost:
            raise Stranger(f"{peer} hung up: it is another run's, or has another token") from lost
        except OSError as error:
            raise Lost(f"{peer}: {error}") from error
        if not hmac.compare_digest(proof, _prove(token, b"node 0", port, mine, theirs)):
            raise Stranger(f"{peer} does not know the run's token")
        return cls(connection, peer)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **content: Any) -> None:
        """Raises Lost."""
        body = msgpack.encode({"kind": kind, **content})
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise Lost(f"{self.peer} takes no messages: {error}") from error

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have arrived whole, without waiting. Raises Lost when nothing will come any more."""
        first = self.receive_one()
        return [] if first is None else [first, *self._whole()]

    def receive_one(self) -> dict[str, Any] | None:
        """The first of them; the others wait for the next call. Raises Lost as `receive`."""
        closed = self._take_in()
        message = next(self._whole(), None)
        if closed and message is None:
            raise Lost(f"{self.peer} closed the connection")
        return message

    def _take_in(self) -> bool:
        """Whatever has arrived; whether the other side has closed the connection."""
        while True:
            try:
                chunk = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise Lost(f"{self.peer}: {error}") from error
            if not chunk:
                return True
            self._arrived += chunk

    def close(self) -> None:
        self._socket.close()

    def _whole(self) -> Iterator[dict[str, Any]]:
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > _LARGEST:
                raise Lost(f"{self.peer} announced a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._arrived) < end:
                return
            body = bytes(self._arrived[_LENGTH.size : end])
            del self._arrived[:end]  # before it is given out: nobody may ask for the next one
            try:
                yield msgpack.decode(body, type=dict[str, Any])
            except MsgspecError as error:
                raise Lost(f"{self.peer} sent what is no message: {error}") from error


def _prove(token: str, side: bytes, port: int, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + port.to_bytes(4, "big") + b"".join(nonces), "sha256")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(count - len(found))
        if not chunk:
            raise Lost("the connection was closed")
        found += chunk
    return found
