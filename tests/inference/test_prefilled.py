"""The engine client with engines that prefill and engines that decode, against a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from stackrl.runtime.inference.answers import Prefilled
from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.transport.messages import Version

WAITING = {"remote_block_ids": [[3, 4]], "remote_host": "h", "remote_port": 7, "do_remote_prefill": True}


class Server:
    """Answers what a test has put in, part by part."""

    def __init__(self) -> None:
        self.body: dict = {}
        self.answer: dict | list = {}
        self.goes_on = asyncio.Event()
        """Set when what follows the first part may be sent."""
        self.metrics = ""
        self.successes = [True]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.body = await request.json()
        if isinstance(self.answer, dict):
            return web.json_response(self.answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in self.answer:
            await response.write(f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode())
            await self.goes_on.wait()
        return response

    async def tell(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": self.successes.pop(0)})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_get("/metrics", server.tell)
    app.router.add_post("/reset_prefix_cache", server.reset)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def engine(server: Server) -> AsyncIterator[Engine]:
    engine = Engine(server.url, "secret", timeout=20, pool="decode")
    yield engine
    await engine.close()


def prefilled(version: str = "1.4", **changes) -> dict:
    choice = {"token_ids": [9], "weight_versions": [{"version": version, "start": 0, "end": 1}]}
    usage = {"prompt_tokens_details": {"cached_tokens": 128}}
    return {"choices": [choice], "usage": usage, "kv_transfer_params": WAITING} | changes


def part(*tokens: int, **changes) -> dict:
    entries = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {"token_ids": list(tokens), "logprobs": {"content": entries}, "finish_reason": None}
    return {"choices": [choice | changes]}


def stream() -> list:
    spans = [{"version": "1.4", "start": 0, "end": 1}, {"version": "1.5", "start": 1, "end": 3}]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}
    return [part(7), part(8, 263, finish_reason="stop", weight_versions=spans), usage, "[DONE]"]


async def ask(engine: Engine, **more):
    fixed = {"max_tokens": 8, "temperature": 0.7, "seed": 5, "salt": "1.4", "stop_token_ids": [263]}
    keys = Prefilled(Version(1, 4), 0, WAITING)
    return await engine.generate([1, 2], request_id="g1", prefilled=keys, **fixed, **more)


async def test_a_prompt_is_prefilled_for_another_engine(server: Server, engine: Engine) -> None:
    server.answer = prefilled()
    found = await engine.prefill([1, 2, 3], salt="1.4", request_id="g1")
    assert found == Prefilled(Version(1, 4), 128, WAITING)
    assert server.body["kv_transfer_params"]["do_remote_decode"] is True
    assert (server.body["token_ids"], server.body["cache_salt"]) == ([1, 2, 3], "1.4")
    assert server.body["sampling_params"]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_transfer_params": None}, r"keeps no keys .* roles\.prefill"),
        ({"kv_transfer_params": WAITING | {"remote_block_ids": []}}, "keeps no keys"),
        ({"choices": []}, "not enough values"),
        (prefilled("incomplete update"), "of no version"),
    ],
)
async def test_an_engine_that_keeps_no_keys_is_an_error(server, engine, changes, reason) -> None:
    server.answer = prefilled() | changes
    with pytest.raises(EngineError, match=reason):
        await engine.prefill([1, 2, 3], salt="1.4", request_id="g1")


async def test_the_first_token_tells_that_the_keys_have_arrived(server: Server, engine: Engine) -> None:
    server.answer = stream()
    arrived = asyncio.Event()
    asked = asyncio.create_task(ask(engine, on_first_token=arrived.set))
    async with asyncio.timeout(20):
        await arrived.wait()
    assert not asked.done()
    server.goes_on.set()
    found = await asked
    assert found.tokens == [7, 8, 263] and found.logprobs == [-0.5] * 3
    assert [(span.start, span.end, str(span.version)) for span in found.spans] == [
        (0, 1, "1.4"),
        (1, 3, "1.5"),
    ]
    assert (found.finish_reason, found.cached, found.prefilled) == ("stop", 16, Version(1, 4))
    assert server.body["kv_transfer_params"] == WAITING
    assert server.body["sampling_params"]["stream_interval"] > 8, "only the first token comes alone"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stream()[:2], "the reply broke off"),
        ([*stream()[:1], {"error": {"message": "KV load failed"}}, "[DONE]"], "KV load failed"),
        ([part(7), stream()[2], "[DONE]"], "'?weight_versions'?"),
    ],
)
async def test_a_reply_that_ends_early_is_an_error(server, engine, answer, reason) -> None:
    server.answer = answer
    server.goes_on.set()
    with pytest.raises(EngineError, match=reason):
        await ask(engine)


async def test_bytes_that_have_moved_are_told(server: Server, engine: Engine) -> None:
    assert await engine.fetched_bytes() == 0
    server.metrics = (
        "# HELP vllm:nixl_bytes_transferred Histogram\n"
        'vllm:nixl_bytes_transferred_bucket{engine="0",le="1"} 5.0\n'
        'vllm:nixl_bytes_transferred_sum{engine="0"} 1024.0\n'
        'vllm:nixl_bytes_transferred_sum{engine="1"} 1.5e+03\n'
    )
    assert await engine.fetched_bytes() == 2524


async def test_a_prefix_cache_in_use_is_emptied_when_it_is_free(server: Server, engine: Engine) -> None:
    server.successes = [False, True]
    await engine.forget_prompts()
    assert not server.successes
    server.successes = [False] * 9
    with pytest.raises(EngineError, match="its prefix cache was in use"):
        await engine.forget_prompts(within=0.1)
