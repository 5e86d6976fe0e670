"""Batches from the orchestrator to the trainer's ranks over HTTP, and their acknowledgements back.

    POST /hello                a rank arrives: Hello → 201, 200 where it is known already, or 409 where it
                               does not fit this run
    GET  /batches/{i}?rank=r   long poll: Batch or End, or 204 after LONG_POLL seconds: ask again
    POST /acks                 Ack → 200
    POST /logprobs             Logprobs → 200

Every request carries the run's token. The server holds one sealed batch, encoded once for each rank, until
rank 0 has applied it; a rank that asks again for it gets the same bytes. A rank that the server does not
know is answered 428: the orchestrator was restarted under it, and it greets again before it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from stackrl.runtime.transport.auth import authorized
from stackrl.runtime.transport.messages import (
    Ack,
    Batch,
    End,
    Hello,
    Logprobs,
    M,
    MessageError,
    decode,
    encode,
)
from stackrl.runtime.transport.strangers import Doorkeeper, listen, many_files, peer, told_in_a_line

LONG_POLL = 20.0
MAX_REQUEST_BYTES = 1 << 20
"""Of hellos and acknowledgements."""
MAX_LOGPROBS_BYTES = 1 << 28
"""Of the logprobs of one rank's batch."""
NEW = 201
"""Status for the first greeting of a rank to this server."""
UNKNOWN = 428
"""Status for a rank that has not said hello to this server."""
_MEDIA = "application/vnd.msgpack"

log = logging.getLogger(__name__)
log.addFilter(told_in_a_line)


class TransportError(Exception):
    """The other side did not answer in time, or refused. The text names it and what it said."""


OnLogprobs = Callable[[Logprobs], None]


class BatchServer:
    """The orchestrator's side. All methods belong to the event loop that started it."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        incarnation: int,
        index: int,
        resumed: bool = False,
        sealed: bool = False,
    ) -> None:
        """``index``: the next batch. ``resumed``: the trainer's ranks are at work already, for an
        orchestrator that was killed. ``sealed``: that one may have handed batch ``index`` out."""
        self._url, self._token = url, token
        self._incarnation = incarnation
        self._ranks = 0
        """How many there are, as the first that greets says."""
        self._index = index
        """The batch that is offered, or will be next."""
        self._resumed, self._sealed = resumed, sealed
        self._payloads: list[bytes] | None = None
        self._end: bytes | None = None
        self._hellos: dict[int, Hello] = {}
        self._seen: float | None = None
        self._acks: dict[tuple[int, int, str], Ack] = {}
        self._ended: set[int] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.on_logprobs: OnLogprobs = lambda message: None
        """Takes what the ranks report; called on the event loop."""

    async def start(self) -> None:
        """Listen on the URL's host and port. Raises OSError where they are taken."""
        doorkeeper = Doorkeeper()
        many_files()
        application = web.Application(
            client_max_size=MAX_LOGPROBS_BYTES, middlewares=[token_required(self._token, doorkeeper)]
        )
        application.router.add_post("/hello", self._on_hello)
        application.router.add_get("/batches/{index}", self._on_batch)
        application.router.add_post("/acks", self._on_ack)
        application.router.add_post("/logprobs", self._on_logprobs)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, logger=log)
        await self._runner.setup()
        address = urlsplit(self._url)
        self._listener = await listen(self._runner.server, address.hostname, address.port, doorkeeper)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def hello(self, within: float) -> Hello:
        """Rank 0's greeting, once all ranks have greeted. Raises TransportError naming the missing ones."""
        await self._until(
            lambda: 0 < self._ranks == len(self._hellos),
            within,
            lambda: f"{self._missing(set(self._hellos))} did not say hello",
        )
        return self._hellos[0]

    async def offer(self, batches: Sequence[Batch]) -> None:
        """Serve one optimizer step's batches, one for each rank, instead of the last ones."""
        if [batch.rank for batch in batches] != list(range(self._ranks)):
            raise ValueError(f"one batch for each of {self._ranks} ranks, in order")
        payloads = [await asyncio.to_thread(encode, batch) for batch in batches]
        async with self._changed:
            self._index, self._payloads = batches[0].index, payloads
            self._changed.notify_all()

    async def fetched(self, within: float) -> None:
        """Wait until every rank has the offered batch. Raises TransportError naming those that do not."""
        index = self._index
        await self._until(
            lambda: len(self._accepted(index)) == self._ranks,
            within,
            lambda: f"{self._missing(self._accepted(index))} did not fetch batch {index}{self._last_seen()}",
        )

    async def applied(self, within: float) -> Ack:
        """Rank 0's acknowledgement that the offered batch was applied; the batch is then let go.

        Raises TransportError where it does not come ``within`` seconds.
        """
        applied = await self._acknowledged(self._index, "applied", within)
        self.go_on()
        return applied

    async def repeated(self, index: int, within: float) -> Ack | None:
        """What rank 0 says anew of batch ``index``, which it has applied under an earlier orchestrator.

        None where it does not come ``within`` seconds.
        """
        try:
            return await self._acknowledged(index, "applied", within)
        except TransportError:
            return None

    async def durable(self, index: int, within: float) -> None:
        """Wait until rank 0's checkpoint after batch ``index`` is on disk. Raises TransportError."""
        await self._until(
            lambda: (index, 0, "durable") in self._acks or self._hellos[0].saved > index,
            within,
            lambda: f"trainer rank 0 did not acknowledge batch {index} as durable{self._last_seen()}",
        )

    async def end(self, reason: str, within: float, *, save: bool = False) -> None:
        """Tell all ranks that there are no more batches, and wait until each has heard it.

        ``save``: they write a checkpoint first, which `durable` waits for.
        """
        async with self._changed:
            self._end = encode(End(reason=reason, save=save))
            self._changed.notify_all()
        await self._until(
            lambda: len(self._ended) == self._ranks,
            within,
            lambda: f"{self._missing(self._ended)} did not ask for more after the end{self._last_seen()}",
        )

    def go_on(self) -> None:
        """The batch of this index is applied: the next one's turn."""
        self._payloads, self._sealed = None, False
        self._index += 1
        self._acks = {key: ack for key, ack in self._acks.items() if key[2] == "durable"}

    async def _acknowledged(self, index: int, state: str, within: float) -> Ack:
        key = (index, 0, state)
        await self._until(
            lambda: key in self._acks,
            within,
            lambda: f"trainer rank 0 did not acknowledge batch {index} as {state}{self._last_seen()}",
        )
        return self._acks[key]

    async def _until(self, true: Callable[[], bool], within: float, complaint: Callable[[], str]) -> None:
        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(true)
        except TimeoutError:
            raise TransportError(f"{complaint()} within {within:.0f} s") from None

    def _accepted(self, index: int) -> set[int]:
        """Ranks that have batch ``index``, by their acknowledgement or by their greeting."""
        said = {rank for (i, rank, state) in self._acks if i == index and state == "accepted"}
        return said | {
            rank
            for rank, hello in self._hellos.items()
            if hello.index > index or (hello.index == index and hello.taken)
        }

    def _missing(self, present: set[int]) -> str:
        if not self._ranks:
            return "the trainer"
        missing = sorted(set(range(self._ranks)) - present)
        return f"trainer rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"

    def _last_seen(self) -> str:
        if self._seen is None:
            return ""
        return f" (the trainer was last heard {time.monotonic() - self._seen:.0f} s ago)"

    def _heard(self, rank: int, incarnation: int, *, greeting: bool = False) -> None:
        """Refuse what is not from this run's trainer."""
        if incarnation != self._incarnation:
            raise web.HTTPConflict(
                text=f"incarnation {incarnation} of the trainer; this run is at {self._incarnation}"
            )
        if not greeting and rank not in self._hellos:
            raise web.HTTPPreconditionRequired(text=f"rank {rank} has not said hello")
        self._seen = time.monotonic()

    async def _on_hello(self, request: web.Request) -> web.Response:
        hello = await _read(request, Hello)
        self._heard(hello.rank, hello.incarnation, greeting=True)
        if not 0 <= hello.rank < hello.ranks:
            raise web.HTTPBadRequest(text=f"rank {hello.rank} of {hello.ranks}")
        if self._ranks and hello.ranks != self._ranks:
            raise web.HTTPConflict(text=f"rank {hello.rank} is one of {hello.ranks}, others of {self._ranks}")
        known = self._hellos.get(hello.rank)
        if known is None and not self._fits(hello):
            raise web.HTTPConflict(
                text=f"the trainer resumes at optimizer step {hello.index}, the orchestrator at {self._index}"
            )
        if known is None or hello.index >= known.index:
            async with self._changed:
                self._ranks = hello.ranks
                self._hellos[hello.rank] = hello
                self._changed.notify_all()
        return web.Response(status=NEW if known is None else 200)

    def _fits(self, hello: Hello) -> bool:
        """Whether the first greeting of a rank is from where this server goes on.

        Under an orchestrator that was restarted a rank may be a step ahead, on the batch that was sealed, or
        a step behind, about to say that it has applied its batch.
        """
        if not self._resumed:
            return hello.index == self._index
        ahead = self._sealed or hello.rank > 0
        return self._index - hello.taken <= hello.index <= self._index + ahead

    async def _on_batch(self, request: web.Request) -> web.Response:
        try:
            index, rank = int(request.match_info["index"]), int(request.query["rank"])
        except (KeyError, ValueError):
            raise web.HTTPBadRequest(text="ask for /batches/<index>?rank=<rank>") from None
        self._heard(rank, self._incarnation)
        if index < self._index:
            raise web.HTTPConflict(text=f"batch {index} is applied; the next one is {self._index}")
        try:
            async with asyncio.timeout(LONG_POLL), self._changed:
                await self._changed.wait_for(lambda: self._end or (self._payloads and index == self._index))
        except TimeoutError:
            return web.Response(status=204)
        if self._payloads is not None and index == self._index:
            return web.Response(body=self._payloads[rank], content_type=_MEDIA)
        async with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()
        return web.Response(body=self._end, content_type=_MEDIA)

    async def _on_ack(self, request: web.Request) -> web.Response:
        ack = await _read(request, Ack)
        self._heard(ack.rank, ack.incarnation)
        served = self._payloads is not None or self._sealed
        if ack.index > self._index or (ack.index == self._index and not served):
            raise web.HTTPConflict(text=f"batch {ack.index} was never served")
        async with self._changed:
            self._acks[ack.index, ack.rank, ack.state] = ack
            self._changed.notify_all()
        return web.Response()

    async def _on_logprobs(self, request: web.Request) -> web.Response:
        message = await _read(request, Logprobs, MAX_LOGPROBS_BYTES)
        self._heard(message.rank, message.incarnation)
        self.on_logprobs(message)
        return web.Response()


def token_required(
    token: str, doorkeeper: Doorkeeper | None = None
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Middleware of aiohttp that answers 401 to every request without the run's token, and tells
    ``doorkeeper`` of those that show it."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]):
        if not authorized(request.headers.get("Authorization"), token):
            raise web.HTTPUnauthorized(text="this run's token is needed")
        if doorkeeper is not None:
            doorkeeper.known(peer(request.transport))
        return await handler(request)

    return check


async def _read(request: web.Request, kind: type[M], limit: int = MAX_REQUEST_BYTES) -> M:
    data = await request.read()
    if len(data) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(data))
    try:
        return decode(data, kind)
    except MessageError as error:
        log.warning("refused a message at %s: %s", request.path, error)
        raise web.HTTPBadRequest(text=f"not a {kind.__name__}: {error}") from error
