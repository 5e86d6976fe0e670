"""The trainer on an engine's GPU starts after the engine. Capping its memory needs a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stackrl.runtime.trainer.shared_gpu import SharedGpuError, wait_for_engine


@pytest.fixture
def engine() -> Iterator[str]:
    """An engine that serves from the third question on, to whoever shows the token."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            ready = self.path == "/health" and asked[-1] == "Bearer token" and len(asked) > 2
            self.send_response(200 if ready else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_engine_is_waited_for(engine: str) -> None:
    wait_for_engine(engine, "token", 20)


def test_an_engine_that_does_not_come_is_named(engine: str) -> None:
    with pytest.raises(SharedGpuError, match=rf"{engine}.*within 1 s \(it answered 503\)"):
        wait_for_engine(engine, "wrong", 1)
