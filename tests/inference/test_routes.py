"""What a real engine answers: nothing without the token; tokens in, tokens out as the client promises."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch
from engine_server import RealEngine

from stackrl.runtime.inference.client import Engine, EngineError, Generation
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUTES = [
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/weight_info"),
    ("GET", "/no-such-route"),
    ("POST", "/pause?mode=keep&clear_cache=false"),
    ("POST", "/update_weights"),
    ("POST", "/collective_rpc"),
    ("POST", "/inference/v1/generate"),
    ("OPTIONS", "/inference/v1/generate"),
]
PROMPT = list(range(40, 60))


async def ask(client: Engine, prompt: list[int] | None = None, **changes) -> Generation:
    settings = {
        "max_tokens": 30,
        "temperature": 1.0,
        "seed": 3,
        "salt": "1.0",
        "stop_token_ids": [],
        "request_id": "r",
    }
    return await client.generate(prompt or PROMPT, **(settings | changes))


async def load(real_engine: RealEngine, client: Engine, version: Version) -> None:
    """Give the engine the weights number 1."""
    publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    try:
        publisher.publish(version, real_engine.versions.tensors(1))
        await client.update(version, publisher.source, "recompute", 120)
    finally:
        publisher.close()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no token", "wrong token"])
async def test_no_route_answers_without_the_token(
    real_engine: RealEngine, client: Engine, headers: dict
) -> None:
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, route in ROUTES:
            async with session.request(method, real_engine.url + route) as answer:
                assert answer.status == 401, route
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(real_engine.url + "/v1/realtime")
    await client.wait_ready(10)
    assert len((await ask(client)).tokens) == 30, "the engine was paused by a stranger"


def test_the_token_is_in_no_command_line_and_no_log(real_engine: RealEngine) -> None:
    assert real_engine.token not in real_engine.log.read_text()
    assert "refused 127.0.0.1 without the run's token" in real_engine.log.read_text()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_that_were_sampled_from(
    real_engine: RealEngine, client: Engine, temperature: float
) -> None:
    await load(real_engine, client, Version(1, 1))
    found = await ask(client, temperature=temperature)
    spans = [(0, 30, 1)]
    expected = real_engine.versions.logprobs(PROMPT, found.tokens, spans, kv="keep", temperature=temperature)
    given = torch.tensor(found.logprobs, dtype=torch.float64)
    assert float((expected - given).abs().max()) < 1e-4
    if temperature != 1:
        raw = real_engine.versions.logprobs(PROMPT, found.tokens, spans, kv="keep")
        assert float((raw - given).abs().max()) > 0.1


async def test_a_stop_token_ends_the_reply_and_is_its_last_token(client: Engine) -> None:
    free = await ask(client)
    stops = [free.tokens[7], free.tokens[9]]
    length = min(map(free.tokens.index, stops)) + 1
    stopped = await ask(client, stop_token_ids=stops)
    assert stopped.tokens == free.tokens[:length]
    assert stopped.finish_reason == "stop" and free.finish_reason == "length"
    assert stopped.logprobs == pytest.approx(free.logprobs[:length], abs=1e-5)


async def test_only_the_stop_tokens_that_were_asked_for_end_a_reply(
    real_engine: RealEngine, client: Engine
) -> None:
    """The model's own end token is a token like others."""
    end = real_engine.versions.model.config.eos_token_id
    replies = await asyncio.gather(
        *(ask(client, seed=seed, max_tokens=200, temperature=2.0, salt="hot") for seed in range(8))
    )
    assert any(end in reply.tokens[:-1] for reply in replies)
    assert {reply.finish_reason for reply in replies} == {"length"}


async def test_max_tokens_ends_at_the_engines_length(client: Engine) -> None:
    found = await ask(client, max_tokens=100_000)
    assert (len(found.tokens), found.finish_reason) == (256 - len(PROMPT), "length")
    with pytest.raises(EngineError, match=r"answered 400: .*longer than the maximum model length of 256"):
        await ask(client, prompt=[1] * 300)


async def test_the_seed_decides_the_reply(client: Engine) -> None:
    first, again, other = await ask(client), await ask(client), await ask(client, seed=4)
    assert first.tokens == again.tokens != other.tokens


async def test_many_requests_at_once_are_all_answered(client: Engine) -> None:
    """Their prompts are more than a step prefills; a cut one with a seed would end vLLM 0.32 on a CPU."""
    replies = await asyncio.gather(
        *(ask(client, prompt=[*PROMPT * 4, seed % 250], seed=seed, max_tokens=5) for seed in range(300))
    )
    assert all(len(reply.tokens) == 5 for reply in replies)


async def test_a_caller_that_leaves_frees_its_place(real_engine: RealEngine, client: Engine) -> None:
    leaving = [asyncio.create_task(ask(client, max_tokens=230, seed=seed)) for seed in range(48)]
    await asyncio.sleep(0.5)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    for _ in range(300):
        if not await busy(real_engine):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the engine still works on requests that nobody waits for")


async def busy(engine: RealEngine) -> bool:
    """Whether the engine runs or queues any request, by its own metrics."""
    headers = {"Authorization": f"Bearer {engine.token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(engine.url + "/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines if line.startswith(names))
