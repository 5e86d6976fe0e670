"""ASGI middleware that closes every route of vLLM's server to those without the run's token.

vLLM's own ``--api-key`` guards /v1 alone and leaves the routes that pause it and replace its weights open.
"""

from __future__ import annotations

import asyncio
import logging

import uvicorn.config
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stackrl.runtime import heartbeat
from stackrl.runtime.run import run_token
from stackrl.runtime.transport.auth import authorized
from stackrl.runtime.transport.strangers import Doorkeeper, FirstOfEach, many_files

log = logging.getLogger("vllm.stackrl")

doorkeeper = Doorkeeper()
"""Of this process's server: uvicorn waits for ever for a first request, and for the end of any."""


class WatchedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose connections the doorkeeper knows of."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        doorkeeper.keep_sweeping(self.loop)
        doorkeeper.arrived(self.client, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        doorkeeper.left(self.client)
        super().connection_lost(error)


uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{WatchedProtocol.__name__}"


class TokenMiddleware:
    """Answers 401 to a request, and closes a websocket, that does not show the token."""

    def __init__(self, app: ASGIApp) -> None:
        many_files()
        self._app = app
        self._token = run_token()
        self._refused_first = FirstOfEach()
        self._serves = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            doorkeeper.known(tuple(scope.get("client") or ()))
            if scope["type"] == "http" and not self._serves:
                self._serves = True
                heartbeat.note("serving")
            await self._app(scope, receive, send)
            return
        self._log_once(scope)
        if scope["type"] == "websocket":
            await receive()  # the handshake, which is then denied
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b'{"error": "this needs the run\'s token"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _allowed(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(shown) == 1 and authorized(shown[0].decode("latin-1"), self._token)

    def _log_once(self, scope: Scope) -> None:
        host = (scope.get("client") or ["unknown"])[0]
        if self._refused_first(host):
            log.warning("refused %s without the run's token (first try: %s)", host, scope["path"])
