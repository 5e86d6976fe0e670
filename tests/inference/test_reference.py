"""The client of a reference model's server, against one that answers as vLLM does, or worse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from loopback import free_port

from stackrl.runtime.inference import reference
from stackrl.runtime.inference.reference import (
    ReferenceFailed,
    ReferenceMisnamed,
    ReferenceRefused,
    ReferenceServer,
)
from stackrl.runtime.transport.messages import Span, Version

KEY = "a-key"


class Server:
    """Gives token n at place p the logprob −n − p / 100, beside that of another token."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.faults: list[web.Response] = []
        """Answered first."""
        self.choice: dict | None = None
        """Answered in place of the right one."""
        self.delay = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        assert request.path == "/v1/completions"
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.delay)
        if self.faults:
            return self.faults.pop(0)
        return web.json_response({"choices": [self.choice or self._answer(body)]})

    def _answer(self, body: dict) -> dict:
        if "return_token_ids" in body:
            sampled = [7, 8, *body["stop_token_ids"]][: body["max_tokens"]]
            told = {"token_logprobs": [-9999.0 if token == 8 else -0.5 for token in sampled]}
            return {"token_ids": sampled, "logprobs": told}
        told = [
            {"999": {"logprob": -0.1, "rank": 1}, str(token): {"logprob": -token - place / 100, "rank": 2}}
            for place, token in enumerate(body["prompt"])
        ]
        return {"prompt_logprobs": [None, *told[1:]]}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server.port = free_port()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def asking(server, monkeypatch) -> AsyncIterator:
    """Makes clients of the server."""
    monkeypatch.setattr(reference, "RETRY_AFTER", 0.01)
    made = []

    def client(path: str = "", key: str | None = KEY, timeout: float = 30.0) -> ReferenceServer:
        made.append(ReferenceServer(f"http://127.0.0.1:{server.port}{path}", "teacher", key, 4, timeout))
        return made[-1]

    yield client
    for each in made:
        await each.close()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_logprobs_of_given_tokens(server, asking, path):
    told = await asking(path).logprobs([5, 3, 4, 2])
    assert told.tolist() == np.array([0, -3.01, -4.02, -2.03], "<f4").tolist()
    [body] = server.bodies
    assert (body["model"], body["prompt"], body["prompt_logprobs"]) == ("teacher", [5, 3, 4, 2], 0)


async def test_an_answer_of_the_teachers_own(server, asking):
    said = await asking().generate(
        [1, 2], max_tokens=9, temperature=0.7, seed=4, stop=[3], version=Version(2, 5)
    )
    assert (said.tokens, said.finish_reason) == ([7, 8, 3], "stop")
    assert said.logprobs == [-0.5, -1000.0, -0.5] and said.spans == [Span(0, 3, Version(2, 5))]
    [body] = server.bodies
    assert body["temperature"] == 0.7 and body["stop_token_ids"] == [3] and body["seed"] == 4
    cut = await asking().generate([1], max_tokens=2, temperature=1.0, seed=4, stop=[3], version=Version(2, 5))
    assert (cut.tokens, cut.finish_reason) == ([7, 8], "length")


async def test_it_is_asked_again_after_what_may_pass(server, asking):
    server.faults = [web.Response(status=503), web.Response(status=429), web.Response(status=500)]
    assert len(await asking().logprobs([1, 2])) == 2
    assert len(server.bodies) == 4


async def test_it_has_a_limit_and_is_named(server, asking):
    server.faults = [web.Response(status=503, text="loading") for _ in range(1000)]
    with pytest.raises(ReferenceFailed) as caught:
        await asking(timeout=0.3).logprobs([1, 2])
    said = str(caught.value)
    assert f"127.0.0.1:{server.port}" in said and "teacher" in said and "503: loading" in said
    assert "algorithm.reference.timeout" in said


async def test_a_server_that_says_nothing(server, asking):
    server.delay = 60.0
    with pytest.raises(ReferenceFailed, match="no answer in"):
        await asking(timeout=0.3).logprobs([1, 2])


async def test_a_server_that_is_not_there():
    client = ReferenceServer(f"http://127.0.0.1:{free_port()}", "teacher", None, 4, 0.2)
    with pytest.raises(ReferenceFailed, match="Connect"):
        await client.logprobs([1, 2])
    await client.close()


async def test_a_wrong_key_is_not_tried_again(server, asking):
    with pytest.raises(ReferenceMisnamed, match=r"see algorithm\.reference"):
        await asking(key="another").logprobs([1, 2])
    server.faults = [web.Response(status=404, text="no model teacher")]
    with pytest.raises(ReferenceMisnamed, match="no model teacher"):
        await asking().logprobs([1, 2])


async def test_what_is_refused_is_refused(server, asking):
    server.faults = [web.Response(status=400, text="longer than 256")]
    with pytest.raises(ReferenceRefused, match="longer than 256"):
        await asking().logprobs([1, 2])


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"text": "hello"}, "logprobs of no tokens came for 2"),
        ({"prompt_logprobs": [None]}, "logprobs of 1 tokens came for 2"),
        ({"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}, "no logprob of token 2"),
        ({"prompt_logprobs": [None, {"2": {"logprob": 2.5}}]}, "no logprobs: the largest is 2.5"),
        ({"prompt_logprobs": [None, {"2": {"logprob": float("nan")}}]}, "no logprobs: the largest is nan"),
        ({"prompt_logprobs": [None, {"2": None}]}, "no logprob of token 2"),
    ],
)
async def test_what_is_no_answer(server, asking, choice, reason):
    server.choice = choice
    with pytest.raises(ReferenceFailed, match=reason):
        await asking().logprobs([1, 2])


@pytest.mark.parametrize("choice", [{"text": "hi"}, {"token_ids": [1], "logprobs": {"token_logprobs": []}}])
async def test_what_is_no_answer_of_its_own(server, asking, choice):
    server.choice = choice
    with pytest.raises(ReferenceFailed, match="something else than tokens"):
        await asking().generate([1], max_tokens=2, temperature=1.0, seed=4, stop=[3], version=Version(2, 5))
