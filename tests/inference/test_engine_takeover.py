"""An orchestrator is killed in an update of a real engine; the next one takes the engine over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import torch
from engine_server import RealEngine

from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OLD, NEW, NEWER = (Version(2000, step) for step in (1, 2, 3))
PROMPT = list(range(40, 70))
TOLERANCE = 1e-4
REQUESTS, TOKENS = 64, 200
"""Of the killed client: more than the engine samples before it is paused or the client is dead."""

PREDECESSOR = """
import asyncio, sys
from stackrl.runtime.inference.client import Engine

async def main(url, token, requests, tokens, source, version, *calls):
    engine = Engine(url, token)
    sampling = {"max_tokens": int(tokens), "seed": 1, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": sampling}
    ask = lambda: engine._call("POST", "/inference/v1/generate", body, 600)
    asking = [asyncio.create_task(ask()) for _ in range(int(requests))]
    await asyncio.sleep(0.1)
    bodies = {
        "/update_weights": {"update_info": {"source": source, "version": version, "timeout": 60}},
        "/finish_weight_update": {"weight_version": version},
    }
    for call in calls:
        await engine._call("POST", call, bodies.get(call), 60)
    print("now", sum(not one.done() for one in asking), flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""
UPDATE = [
    "/pause?mode=keep&clear_cache=false",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
]


@pytest.fixture
def publisher(real_engine: RealEngine) -> Iterator[PullPublisher]:
    publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    yield publisher
    publisher.close()


@asynccontextmanager
async def predecessor(
    engine: RealEngine, source: str, version: Version, calls: list[str]
) -> AsyncIterator[int]:
    """A client that has made ``calls``, as a process that is then killed; how many of its requests run."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PREDECESSOR, engine.url, engine.token,
        str(REQUESTS), str(TOKENS), source, str(version), *calls,
        stdout=asyncio.subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            said, running = (await process.stdout.readline()).split()
        assert said == b"now"
        yield int(running)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def counted(engine: RealEngine, metric: str) -> int:
    """A metric of the engine."""
    async with (
        aiohttp.ClientSession(headers=bearer(engine.token)) as session,
        session.get(f"{engine.url}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(metric + "{")))


async def logprobs_off(engine: RealEngine, client: Engine, version: Version) -> float:
    """How far the engine's logprobs are from those of the weights that are ``version``'s."""
    reply = await client.generate(
        PROMPT, max_tokens=30, temperature=1.0, seed=3, salt=f"{version} anew", stop_token_ids=[],
        request_id=f"takeover-{os.urandom(4).hex()}",
    )  # fmt: skip
    assert {span.version for span in reply.spans} == {version}
    expected = engine.versions.logprobs(PROMPT, reply.tokens, [(0, 30, version.step)], kv="keep")
    return float((expected - torch.tensor(reply.logprobs, dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("made", range(1, len(UPDATE) + 1), ids=[call.partition("?")[0] for call in UPDATE])
async def test_what_a_killed_client_left_half_done_is_settled(
    real_engine: RealEngine, client: Engine, publisher: PullPublisher, made: int
) -> None:
    for version in (OLD, NEW):
        tensors = real_engine.versions.tensors(version.step)
        await asyncio.to_thread(publisher.publish, version, tensors)
    await client.update(OLD, publisher.source, "keep", 120)
    async with predecessor(real_engine, publisher.source, NEW, UPDATE[:made]) as running:
        assert running, "some stand still"
    assert (await client._call("GET", "/is_paused", None, 60))["is_paused"]

    assert await client.settle() is None
    assert not (await client._call("GET", "/is_paused", None, 60))["is_paused"]
    with pytest.raises(EngineError, match="of no version"):
        await client.version()

    await asyncio.to_thread(publisher.publish, NEWER, real_engine.versions.tensors(NEWER.step))
    await client.update(NEWER, publisher.source, "keep", 120)
    assert await client.settle() == NEWER
    assert await logprobs_off(real_engine, client, NEWER) < TOLERANCE


async def test_requests_of_a_killed_client_end_with_it(real_engine: RealEngine, client: Engine) -> None:
    """They are given up, and not sampled to their end for nobody."""
    before = await counted(real_engine, "vllm:generation_tokens_total")
    async with predecessor(real_engine, "", NEW, []) as running:
        assert running
    await asyncio.sleep(0.5)
    sampled = await counted(real_engine, "vllm:generation_tokens_total") - before
    await asyncio.sleep(1.5)
    assert await counted(real_engine, "vllm:generation_tokens_total") - before == sampled
    assert sampled < REQUESTS * TOKENS
