"""Weights by broadcast: the trainer sends a version once, to all engines' workers at a time.

    POST /weights/{version}/broadcast     a receiver comes for a version: how it takes part, or nothing: alone
    PUT  /groups/{group}/{key}            } where the members of a process group find each other
    GET  /groups/{group}/{key}            }

Rank 0 keeps its versions as for `pull`, on the same server, and broadcasts them from there while the trainer
goes on. A broadcast begins when the receivers that are expected have come (rounds.py). A group of the same
members is used again; one that broke is left, and its members fetch from the server what they lack, as those
do who go alone. So a version arrives whole at every engine that lives, whatever becomes of the others.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist

from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.broadcast import send
from stackrl.runtime.transport.messages import (
    Broadcast,
    JoinBroadcast,
    MessageError,
    Version,
    decode,
    encode,
)
from stackrl.runtime.transport.process_group import Group, GroupError
from stackrl.runtime.transport.pull import WeightHandler, WeightServer
from stackrl.runtime.transport.rounds import Rounds
from stackrl.runtime.transport.store import Snapshot, WeightStore
from stackrl.runtime.transport.weights import NamedTensors, Published, WeightsGone
from stackrl.schemas.base import size_in_bytes
from stackrl.schemas.inference import CollectiveWeights
from stackrl.schemas.stack import Stack

log = logging.getLogger(__name__)

SCHEME = "collective://"
SILENCE = 30.0
"""Seconds that one operation of a broadcast may take, before the others go on without it."""
POLL = 10.0
"""Seconds that a question for a key of a group is held open."""
_GROUPS_KEPT = 8
LARGEST_BODY = 1 << 16
"""Bytes that a receiver may send."""


class CollectivePublisher:
    """Publishes into a store; a thread of its server broadcasts to those who come, and serves the others."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        backend: str,
        settings: CollectiveWeights,
        silence: float = SILENCE,
    ) -> None:
        """``backend``: gloo or nccl, which uses the current GPU."""
        self._store = WeightStore()
        self._leader = Leader(host, token, backend, settings, silence)
        self._server = WeightServer(self._store, host, port, token, partial(_Handler, self._leader))
        self.source = SCHEME + urlsplit(self._server.url).netloc

    def publish(self, version: Version, tensors: NamedTensors) -> Published:
        return self._store.publish(version, tensors)

    def close(self) -> None:
        self._server.close()
        self._leader.close()


def make_collective(run: RunFolder, stack: Stack, token: str) -> CollectivePublisher:
    """The publisher of a run whose ``weights.transport`` is collective."""
    address = urlsplit(run.endpoints().weights)
    backend = stack.weights.backend or ("gloo" if stack.device == "cpu" else "nccl")
    return CollectivePublisher(address.hostname or "", address.port or 0, token, backend, stack.weights)


@dataclass
class _Led:
    """A process group that this process leads. ``members``: in the order of their ranks, from rank 1 on."""

    name: str
    members: list[str]
    meeting: dist.HashStore = field(default_factory=dist.HashStore)
    group: Group | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the broadcast that uses it."""
    broken: bool = False


class Leader:
    """Rank 0 of all broadcasts of a trainer."""

    def __init__(
        self, host: str, token: str, backend: str, settings: CollectiveWeights, silence: float
    ) -> None:
        self._host, self._token, self._silence = host, token, silence
        self._backend, self._bucket = backend, size_in_bytes(settings.bucket)
        self._gpu = torch.cuda.current_device() if backend == "nccl" else None
        self._rounds: Rounds[Mapping[str, Broadcast]] = Rounds(settings.gather)
        self._lock = threading.Lock()
        self._groups: dict[str, _Led] = {}
        """By name, the newest last."""
        self._usable: _Led | None = None
        """The group of the newest broadcast, unless it broke."""

    def join(self, snapshot: Snapshot, wish: JoinBroadcast) -> Broadcast | None:
        """How a receiver takes part in the broadcast of a version; None where it goes alone.

        Waits for the others, then the broadcast begins.
        """
        begin = partial(self._begin, snapshot)
        ways = self._rounds.join(snapshot.manifest.version, wish.member, wish.holds, begin)
        return None if ways is None else ways[wish.member]

    def meeting(self, group: str) -> dist.Store | None:
        """Where the members of ``group`` find each other; None where nobody knows it."""
        with self._lock:
            led = self._groups.get(group)
        return led and led.meeting

    def close(self) -> None:
        with self._lock:
            led, self._usable = self._usable, None
        if led and led.group and led.turn.acquire(timeout=self._silence):
            led.group.close()
            led.turn.release()

    def _begin(self, snapshot: Snapshot, members: Mapping[str, str]) -> Mapping[str, Broadcast]:
        """Each of ``members``, who hold the groups named, takes part in this way; the broadcast has begun."""
        led = self._group_of(members)
        threading.Thread(
            target=self._lead,
            args=(led, snapshot),
            name=f"broadcast {snapshot.manifest.version}",
            daemon=True,
        ).start()
        return {
            member: Broadcast(
                group=led.name,
                rank=rank,
                ranks=1 + len(led.members),
                backend=self._backend,
                bucket=self._bucket,
                silence=self._silence,
                manifest=snapshot.manifest,
            )
            for rank, member in enumerate(led.members, 1)
        }

    def _group_of(self, members: Mapping[str, str]) -> _Led:
        """The group of the broadcast before, where just these ``members`` still hold it; else a new one."""
        with self._lock:
            led = self._usable
            if led and set(led.members) == set(members) and set(members.values()) == {led.name}:
                return led
            led = self._usable = _Led(secrets.token_hex(16), list(members))
            self._groups[led.name] = led
            for old in list(self._groups)[:-_GROUPS_KEPT]:
                del self._groups[old]
            return led

    def _lead(self, led: _Led, snapshot: Snapshot) -> None:
        """One broadcast, in a thread of its own."""
        version, began = snapshot.manifest.version, time.monotonic()
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # each thread has its own current one
        with led.turn:
            try:
                led.group = led.group or self._meet(led)
                send(led.group, snapshot.manifest.tensors, snapshot.tensors, self._bucket)
            except Exception as error:
                self._leave(led)
                log.warning(
                    "the broadcast of weight version %s to %d receivers broke off (%s); they fetch the rest",
                    version,
                    len(led.members),
                    error,
                    exc_info=not isinstance(error, GroupError),
                )
                return
        seconds = time.monotonic() - began
        log.info("weight version %s went to %d receivers in %.3g s", version, len(led.members), seconds)

    def _meet(self, led: _Led) -> Group:
        if led.broken:
            raise GroupError("an earlier broadcast in this group broke off")
        return Group(
            led.meeting,
            led.name,
            0,
            1 + len(led.members),
            backend=self._backend,
            host=self._host,
            token=self._token,
            silence=self._silence,
        )

    def _leave(self, led: _Led) -> None:
        with self._lock:
            if self._usable is led:
                self._usable = None
        led.broken = True
        if led.group:
            led.group.close()
            led.group = None


class _Handler(WeightHandler):
    """What a WeightHandler answers, and where receivers come together."""

    def __init__(self, leader: Leader, *connection: Any) -> None:
        self._leader = leader
        super().__init__(*connection)

    def do_GET(self) -> None:
        if not (route := self._group_route()):
            return super().do_GET()
        if not self.admitted():
            return None
        meeting, key = self._leader.meeting(route[1]), unquote(route[2])
        if meeting is None:
            return self._text(410, f"group {route[1]} is no more")
        try:
            meeting.wait([key], timedelta(seconds=POLL))
        except dist.DistStoreError:
            return self._text(404, f"{key} is not there yet")
        return self._answer(meeting.get(key))

    def do_PUT(self) -> None:
        if not self.admitted():
            return None
        route, body = self._group_route(), self._body()
        if body is None:
            return None
        if not (route and (meeting := self._leader.meeting(route[1]))):
            return self._text(404, f"nothing is kept at {self.path}")
        meeting.set(unquote(route[2]), body)
        return self._answer(b"")

    def do_POST(self) -> None:
        if not self.admitted():
            return None
        route, body = re.fullmatch(r"/weights/(\d+\.\d+)/broadcast", self.path), self._body()
        if body is None:
            return None
        if not route:
            return self._text(404, f"nothing is served at {self.path}")
        try:
            wish = decode(body, JoinBroadcast)
            snapshot = self.server.store.get(Version.parse(route[1]))
        except MessageError as error:
            return self._text(400, str(error))
        except WeightsGone as error:
            return self._text(410, str(error))
        except KeyError as error:
            return self._text(404, error.args[0])
        way = self._leader.join(snapshot, wish)
        return self._answer(encode(way) if way else b"")

    def _group_route(self) -> re.Match[str] | None:
        return re.fullmatch(r"/groups/([0-9a-f]{32})/(.+)", self.path)

    def _body(self) -> bytes | None:
        """What was sent; where that makes no sense, None, and it has its answer."""
        length = self.headers.get("Content-Length") or ""
        if length.isdecimal() and int(length) <= LARGEST_BODY:
            return self.rfile.read(int(length))
        self.close_connection = True
        self._text(413, f"a body of at most {LARGEST_BODY} bytes belongs to this")
        return None

    def _answer(self, body: bytes) -> None:
        self._head(200, "application/octet-stream", len(body))
        self.wfile.write(body)
