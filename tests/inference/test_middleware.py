"""The token middleware around any ASGI application, as Starlette runs it."""

from __future__ import annotations

import logging

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from stackrl.runtime import heartbeat
from stackrl.runtime.inference.middleware import TokenMiddleware


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("STACKRL_TOKEN", "secret")

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    app = Starlette(
        routes=[
            Route("/health", lambda request: PlainTextResponse("fine"), methods=["GET", "POST", "OPTIONS"]),
            WebSocketRoute("/socket", echo),
        ]
    )
    app.add_middleware(TokenMiddleware)
    return TestClient(app)


WRONG = [
    {},
    {"Authorization": "secret"},
    {"Authorization": "Bearer secrets"},
    {"Authorization": "Bearer secre"},
    {"Authorization": "Basic secret"},
    {"Authorization": "Bearer s\u00e9cret".encode("latin-1")},
]


@pytest.mark.parametrize("headers", WRONG)
def test_without_the_token_nothing_answers(client: TestClient, headers: dict) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = client.request(method, "/health", headers=headers)
        assert answer.status_code == 401
        assert "token" in answer.json()["error"]
    assert client.get("/no-such-route", headers=headers).status_code == 401
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket", headers=headers):
        pass


def test_it_says_that_it_serves_at_the_first_request_that_is_let_in(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(heartbeat, "note", said.append)
    client.get("/health")
    assert said == []
    for _ in range(2):
        client.get("/health", headers={"Authorization": "Bearer secret"})
    assert said == ["serving"]


def test_with_the_token_everything_is_as_it_was(client: TestClient) -> None:
    headers = {"Authorization": "Bearer secret"}
    assert client.get("/health", headers=headers).text == "fine"
    assert client.get("/no-such-route", headers=headers).status_code == 404
    with client.websocket_connect("/socket", headers=headers) as socket:
        assert socket.receive_text() == "hello"


def test_two_tokens_are_not_one(client: TestClient) -> None:
    both = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")]
    assert client.get("/health", headers=both).status_code == 401


def test_a_peer_is_logged_once_and_the_token_never(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.get("/health", headers={"Authorization": "Bearer guess"})
    assert len(caplog.records) == 1
    assert "testclient" in caplog.text and "guess" not in caplog.text and "secret" not in caplog.text


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STACKRL_TOKEN", raising=False)
    with pytest.raises(SystemExit, match="STACKRL_TOKEN is not set"):
        TokenMiddleware(Starlette())
