"""Batches from the orchestrator to the trainer's ranks over HTTP, and their acknowledgements back.

    POST /hello                a rank arrives: Hello → 200, or 409 where it does not fit this run
    GET  /batches/{i}?rank=r   long poll: Batch or End, or 204 after LONG_POLL seconds: ask again
    POST /acks                 Ack → 200

Every request carries the run's token. The server holds one sealed batch, encoded once for each rank, until
rank 0 has applied it; a rank that asks again for it gets the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import httpx
from aiohttp import web

from stackrl.runtime.transport.auth import authorized, bearer
from stackrl.runtime.transport.messages import (
    Ack,
    Batch,
    End,
    Hello,
    M,
    MessageError,
    Version,
    decode,
    encode,
)

LONG_POLL = 20.0
MAX_REQUEST_BYTES = 1 << 20
"""Of what a trainer sends: hellos and acknowledgements, never arrays."""
SILENCE = 300.0
"""Seconds without any answer after which a client gives the orchestrator up."""
_REQUEST = 30.0
"""Seconds that a client gives one request beyond the long poll."""
_RETRY = 0.5
_MEDIA = "application/vnd.msgpack"

log = logging.getLogger(__name__)


class TransportError(Exception):
    """The other side did not answer in time, or refused. The text names it and what it said."""


class BatchServer:
    """The orchestrator's side. All methods belong to the event loop that started it."""

    def __init__(self, url: str, token: str, *, incarnation: int, index: int) -> None:
        self._url, self._token = url, token
        self._incarnation = incarnation
        self._ranks = 0
        """How many there are, as the first that greets says."""
        self._index = index
        """The batch that is offered, or will be next."""
        self._payloads: list[bytes] | None = None
        self._end: bytes | None = None
        self._hellos: dict[int, Hello] = {}
        self._seen: float | None = None
        self._acks: dict[tuple[int, int, str], Ack] = {}
        self._ended: set[int] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on the URL's host and port. Raises OSError where they are taken."""
        application = web.Application(
            client_max_size=MAX_REQUEST_BYTES, middlewares=[token_required(self._token)]
        )
        application.router.add_post("/hello", self._on_hello)
        application.router.add_get("/batches/{index}", self._on_batch)
        application.router.add_post("/acks", self._on_ack)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        address = urlsplit(self._url)
        await web.TCPSite(self._runner, address.hostname, address.port).start()

    async def close(self) -> None:
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
        payloads = [encode(batch) for batch in batches]
        async with self._changed:
            self._index, self._payloads = batches[0].index, payloads
            self._changed.notify_all()

    async def applied(self, *, fetch: float, step: float) -> Ack:
        """Rank 0's acknowledgement that the offered batch was applied; the batch is then let go.

        ``fetch``: seconds within which every rank takes the batch; ``step``: seconds for the step after that.
        Raises TransportError naming who was waited for.
        """
        index = self._index
        await self._until(
            lambda: all((index, rank, "accepted") in self._acks for rank in range(self._ranks)),
            fetch,
            lambda: f"{self._missing(self._accepted(index))} did not fetch batch {index}{self._last_seen()}",
        )
        applied = await self._acknowledged(index, "applied", step)
        self._payloads = None
        self._index = index + 1
        self._acks = {key: ack for key, ack in self._acks.items() if key[2] == "durable"}
        return applied

    async def durable(self, index: int, within: float) -> Ack:
        """Rank 0's acknowledgement that its checkpoint after batch ``index`` is on disk."""
        return await self._acknowledged(index, "durable", within)

    async def end(self, reason: str, within: float) -> None:
        """Tell all ranks that there are no more batches, and wait until each has heard it."""
        async with self._changed:
            self._end = encode(End(reason=reason))
            self._changed.notify_all()
        await self._until(
            lambda: len(self._ended) == self._ranks,
            within,
            lambda: f"{self._missing(self._ended)} did not ask for more after the end{self._last_seen()}",
        )

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
        return {rank for (i, rank, state) in self._acks if i == index and state == "accepted"}

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
            raise web.HTTPConflict(text=f"rank {rank} has not said hello")
        self._seen = time.monotonic()

    async def _on_hello(self, request: web.Request) -> web.Response:
        hello = await _read(request, Hello)
        self._heard(hello.rank, hello.incarnation, greeting=True)
        if not 0 <= hello.rank < hello.ranks:
            raise web.HTTPBadRequest(text=f"rank {hello.rank} of {hello.ranks}")
        if self._ranks and hello.ranks != self._ranks:
            raise web.HTTPConflict(text=f"rank {hello.rank} is one of {hello.ranks}, others of {self._ranks}")
        if hello.index != self._index and hello.rank not in self._hellos:
            raise web.HTTPConflict(
                text=f"the trainer resumes at optimizer step {hello.index}, the orchestrator at {self._index}"
            )
        async with self._changed:
            self._ranks = hello.ranks
            self._hellos[hello.rank] = hello
            self._changed.notify_all()
        return web.Response()

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
        if ack.index > self._index or (ack.index == self._index and self._payloads is None):
            raise web.HTTPConflict(text=f"batch {ack.index} was never served")
        async with self._changed:
            self._acks[ack.index, ack.rank, ack.state] = ack
            self._changed.notify_all()
        return web.Response()


class BatchClient:
    """A trainer rank's side: synchronous, one request at a time. Use as a context, or close it."""

    def __init__(self, url: str, token: str, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._incarnation = 0
        self._http = httpx.Client(
            base_url=url,
            headers=bearer(token),
            timeout=httpx.Timeout(LONG_POLL + _REQUEST, connect=_REQUEST),
        )

    def hello(self, *, incarnation: int, index: int, version: Version, weights: str, timeout: float) -> None:
        """Greet the orchestrator, which may still be starting. Raises TransportError where it refuses."""
        self._incarnation = incarnation
        hello = Hello(
            incarnation=incarnation,
            rank=self._rank,
            ranks=self._ranks,
            index=index,
            version=version,
            weights=weights,
        )
        self._request("POST", "/hello", timeout, content=encode(hello))

    def fetch(self, index: int, silence: float = SILENCE) -> Batch | End:
        """Batch ``index``, or the end. An arrived batch is acknowledged as accepted.

        Waits for as long as the orchestrator answers that there is none yet: it has limits of its own for
        all that a batch needs. Raises TransportError when it gives no answer for ``silence`` seconds,
        MessageError for a garbled batch.
        """
        path = f"/batches/{index}?rank={self._rank}"
        while (response := self._request("GET", path, silence)).status_code == 204:
            pass
        message = decode(response.content, Batch, End)
        if isinstance(message, Batch):
            self._check(message, index)
            version = Version(self._incarnation, message.step)
            self.ack(index=index, step=message.step, state="accepted", version=version, timeout=silence)
        return message

    def ack(
        self,
        *,
        index: int,
        step: int,
        state: str,
        version: Version,
        metrics: dict[str, float] | None = None,
        timeout: float = SILENCE,
    ) -> None:
        """Say how far a batch came; see Ack. Raises TransportError where that cannot be said."""
        ack = Ack(
            incarnation=self._incarnation,
            index=index,
            step=step,
            rank=self._rank,
            state=state,
            version=version,
            metrics=metrics or {},
        )
        self._request("POST", "/acks", timeout, content=encode(ack))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, batch: Batch, index: int) -> None:
        got = (batch.incarnation, batch.index, batch.rank, batch.ranks)
        if got != (self._incarnation, index, self._rank, self._ranks):
            raise MessageError(f"asked for batch {index} and got {got}: incarnation, index, rank, ranks")

    def _request(
        self, method: str, path: str, timeout: float, content: bytes | None = None
    ) -> httpx.Response:
        """One request, repeated while nobody answers, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                response = self._http.request(method, path, content=content)
            except httpx.TransportError as error:
                if time.monotonic() + _RETRY > deadline:
                    raise TransportError(
                        f"the orchestrator did not answer {method} {path} within {timeout:.0f} s: {error}"
                    ) from error
                time.sleep(_RETRY)
                continue
            if response.is_success:
                return response
            raise TransportError(
                f"the orchestrator refused {method} {path} with {response.status_code}: {response.text[:500]}"
            )


def token_required(token: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Middleware of aiohttp that answers 401 to every request without the run's token."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]):
        if not authorized(request.headers.get("Authorization"), token):
            raise web.HTTPUnauthorized(text="this run's token is needed")
        return await handler(request)

    return check


async def _read(request: web.Request, kind: type[M]) -> M:
    try:
        return decode(await request.read(), kind)
    except MessageError as error:
        log.warning("refused a message at %s: %s", request.path, error)
        raise web.HTTPBadRequest(text=f"not a {kind.__name__}: {error}") from error
