"""A receiver of broadcasts: an engine's worker, as a member of the trainer's groups (collective.py)."""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from urllib.parse import quote, urlsplit

import torch
import torch.distributed as dist

from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.broadcast import arriving
from stackrl.runtime.transport.collective import LARGEST_BODY, POLL, SCHEME
from stackrl.runtime.transport.messages import (
    Broadcast,
    JoinBroadcast,
    MessageError,
    Version,
    decode,
    encode,
)
from stackrl.runtime.transport.process_group import Group, GroupError
from stackrl.runtime.transport.source import open_source, receive_whole
from stackrl.runtime.transport.weights import WeightError, check_manifest, verify

log = logging.getLogger(__name__)

ANSWER_WITHIN = 30.0
"""Seconds that rank 0's server may take for an answer, besides what it holds a question open."""


class Receiver:
    """What one process keeps between two versions: its name, and the group that it has last been in."""

    def __init__(self) -> None:
        self._name = ""
        self._group: Group | None = None

    def receive(
        self, source: str, version: Version, token: str, timeout: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of ``version``, checked, in the manifest's order: by broadcast as far as that goes,
        then alone. Raises as ``weights.receive`` does."""
        server, deadline = _Server(source.removeprefix(SCHEME), token), time.monotonic() + timeout
        done = 0
        try:
            if way := self._join(server, version, timeout):
                for name, tensor in self._broadcast(server, way, version, deadline):
                    yield name, tensor
                    done += 1
                return
        except GroupError as error:
            log.warning(
                "weight version %s: %d tensors came by broadcast, the rest is fetched: %s",
                version,
                done,
                error,
            )
        with open_source(f"http://{server.address}", token, deadline) as alone:
            manifest = alone.manifest(version)
            check_manifest(manifest, version, alone.name)
            yield from receive_whole(alone, manifest, done)

    def leave(self) -> None:
        """Let go of the group: the others notice if they are in the middle of a broadcast."""
        if self._group:
            self._group.close()
        self._group = None

    def _join(self, server: _Server, version: Version, timeout: float) -> Broadcast | None:
        """Wait until the broadcast begins; None where there is none for this receiver. Raises GroupError."""
        self._name = self._name or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        wish = JoinBroadcast(member=self._name, holds=self._group.name if self._group else "")
        try:
            answer = server.ask("POST", f"/weights/{version}/broadcast", encode(wish), timeout)
            return decode(answer, Broadcast) if answer else None
        except MessageError as error:
            raise GroupError(f"rank 0 answered what is no message: {error}") from error

    def _broadcast(
        self, server: _Server, way: Broadcast, version: Version, deadline: float
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor. Raises GroupError, and the group is left."""
        whole = False
        try:
            check_manifest(way.manifest, version, server.address)
            if self._group is None or self._group.name != way.group:
                self._meet(server, way)
            for info, tensor in arriving(self._group, way.manifest.tensors, way.bucket):
                if time.monotonic() > deadline:
                    raise GroupError("the time of the update is over; raise weights.timeout")
                if tensor.device.type == "cpu":
                    verify(info, tensor, version, server.address)
                yield info.name, tensor
            whole = True
        except WeightError as error:
            raise GroupError(str(error)) from error
        finally:
            if not whole:
                self.leave()

    def _meet(self, server: _Server, way: Broadcast) -> None:
        self.leave()
        self._group = Group(
            _Meeting(server, way.group, way.silence),
            way.group,
            way.rank,
            way.ranks,
            backend=way.backend,
            host=server.seen_from,
            token=server.token,
            silence=way.silence,
        )


_OF_THIS_PROCESS = Receiver()


def receive_broadcast(
    source: str, version: Version, token: str, timeout: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """`Receiver.receive` of the one receiver that this process is."""
    return _OF_THIS_PROCESS.receive(source, version, token, timeout)


class _Server:
    """Rank 0's server. Raises GroupError where it does not do what it is asked."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self.token = address, token
        self.seen_from = ""
        """This machine's address on the way to it, once it has been asked."""

    def ask(self, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
        """What it answers."""
        status, answer = self.answer(method, path, body, timeout)
        if status != 200:
            raise GroupError(f"{self.address} answered {status} to {method} {path}: {_start(answer)}")
        return answer

    def answer(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """Status and body of its answer, which may take ``timeout`` seconds."""
        where = urlsplit(f"//{self.address}")
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=timeout)
        try:
            connection.request(method, path, body, headers=bearer(self.token))
            self.seen_from = connection.sock.getsockname()[0]
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise GroupError(f"{self.address} did not answer {method} {path}: {error!r}") from error
        finally:
            connection.close()


class _Meeting(dist.Store):
    """Where the members of a group find each other: torch's store, kept by rank 0's server."""

    def __init__(self, server: _Server, group: str, patience: float) -> None:
        super().__init__()
        self._server, self._group, self._patience = server, group, patience

    def set(self, key: str, value: bytes | str) -> None:
        body = value.encode() if isinstance(value, str) else bytes(value)
        if len(body) > LARGEST_BODY:
            raise GroupError(f"{len(body)} bytes at once")
        self._server.ask("PUT", self._path(key), body, ANSWER_WITHIN)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            status, answer = self._server.answer("GET", self._path(key), None, POLL + ANSWER_WITHIN)
            if status == 200:
                return answer
            if status != 404:
                raise GroupError(f"{self._server.address} answered {status}: {_start(answer)}")
        raise GroupError(f"{key} of group {self._group} was not there within {self._patience:g} s")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _path(self, key: str) -> str:
        return f"/groups/{self._group}/{quote(key, safe='')}"


def _start(answer: bytes) -> str:
    return answer[:200].decode(errors="replace")
