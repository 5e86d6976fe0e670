"""A real engine takes versions by broadcast, alone and with others, and samples from each exactly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import httpx
import pytest
import torch
from engine_server import RealEngine

from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.collective import CollectivePublisher
from stackrl.runtime.transport.messages import Broadcast, JoinBroadcast, Version, decode, encode
from stackrl.schemas.inference import CollectiveWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
INCARNATION = itertools.count(5000)
each_model = pytest.mark.parametrize(
    "real_engine",
    [
        pytest.param(kind, marks=pytest.mark.nightly if kind else ())
        for kind in (None, "qwen3-tied", "qwen3-moe-tied", "qwen3-moe", "glm4-moe")
    ],
    indirect=True,
)


@pytest.fixture
def publisher(real_engine: RealEngine) -> Iterator[CollectivePublisher]:
    settings = CollectiveWeights(transport="collective", bucket="64KiB", gather=20.0)
    made = CollectivePublisher("127.0.0.1", 0, real_engine.token, "gloo", settings, silence=5.0)
    yield made
    made.close()


async def update(
    engine: RealEngine, client: Engine, publisher: CollectivePublisher, version: Version, without: str = ""
) -> None:
    tensors = [pair for pair in engine.versions.tensors(version.step) if pair[0] != without]
    await asyncio.to_thread(publisher.publish, version, tensors)
    await client.update(version, publisher.source, "keep", 120)


async def exact(engine: RealEngine, client: Engine, version: Version) -> None:
    """What the engine samples is of ``version``, and of no other."""
    prompt = [version.step, *range(40, 70)]
    reply = await client.generate(
        prompt,
        max_tokens=40,
        temperature=1.0,
        seed=version.step,
        salt=str(version),
        stop_token_ids=[],
        request_id=str(version),
    )
    assert [span.version for span in reply.spans] == [version]
    found = torch.tensor(reply.logprobs, dtype=torch.float64)
    for step in (version.step - 1, version.step):
        expected = engine.versions.logprobs(prompt, reply.tokens, [(0, 40, step)], kv="keep")
        assert (float((expected - found).abs().max()) < TOLERANCE) == (step == version.step)


@each_model
async def test_each_version_that_is_broadcast_is_the_one_that_samples(
    real_engine: RealEngine, client: Engine, publisher: CollectivePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stackrl.runtime.transport.collective")
    incarnation = next(INCARNATION)
    for step in (1, 2, 3):
        await update(real_engine, client, publisher, Version(incarnation, step))
        await exact(real_engine, client, Version(incarnation, step))
    sent = [line.partition(" in ")[0] for line in caplog.messages]
    assert sent == [f"weight version {incarnation}.{step} went to 1 receivers" for step in (2, 3)]

    with pytest.raises(EngineError, match="the trainer did not send every tensor"):
        await update(real_engine, client, publisher, Version(incarnation, 4), "model.norm.weight")
    with pytest.raises(EngineError, match="of no version since an update failed"):
        await client.version()
    await update(real_engine, client, publisher, Version(incarnation, 5))
    await exact(real_engine, client, Version(incarnation, 5))


@pytest.mark.nightly
async def test_another_receiver_that_dies_keeps_the_engine_from_nothing(
    real_engine: RealEngine, client: Engine, publisher: CollectivePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that it takes part, and is not heard of again."""
    incarnation = next(INCARNATION)
    await update(real_engine, client, publisher, Version(incarnation, 1))
    await asyncio.to_thread(come, publisher, real_engine.token, Version(incarnation, 1))
    version = Version(incarnation, 2)
    await asyncio.to_thread(publisher.publish, version, real_engine.versions.tensors(2))
    _, way = await asyncio.gather(
        client.update(version, publisher.source, "keep", 120),
        asyncio.to_thread(come, publisher, real_engine.token, version),
    )
    assert decode(way, Broadcast).ranks == 3
    assert "broke off" in caplog.text
    await exact(real_engine, client, version)


def come(publisher: CollectivePublisher, token: str, version: Version) -> bytes:
    url = publisher.source.replace("collective://", "http://") + f"/weights/{version}/broadcast"
    wish = encode(JoinBroadcast(member="dies"))
    return httpx.post(url, content=wish, headers=bearer(token), timeout=60).raise_for_status().content
