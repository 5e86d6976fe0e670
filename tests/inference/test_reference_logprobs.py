"""The logprobs that a real engine tells of given tokens are those of the model that it serves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_server import RealEngine

from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.inference.reference import ReferenceFailed, ReferenceServer
from stackrl.runtime.inference.server import SERVED_NAME
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.model import model_of
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEQUENCES = [[3, 40, 41, 42, 7, 7, 7, 200, 17], list(range(60, 0, -3)), [9] * 100]
STOP = 5


@pytest_asyncio.fixture
async def first_weights(real_engine: RealEngine, client: Engine) -> None:
    """Weights number 0 on the engine, under a version of their own."""
    publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    version = Version(4000, 0)
    publisher.publish(version, real_engine.versions.tensors(0))
    await client.update(version, publisher.source, "keep", 120)
    publisher.close()


@torch.no_grad()
def trainers(engine: RealEngine, tokens: list[int]) -> np.ndarray:
    """By the trainer's model, from the files that the engine has read."""
    model = model_of(engine.run.model)
    folder.load(model, engine.run.model)
    ids, places = torch.tensor(tokens), torch.arange(len(tokens) - 1)
    logprobs, _ = model(ids, layout(np.array([len(ids)])), places, ids[1:], torch.ones(len(places)))
    return logprobs.double().numpy()


async def test_an_engine_tells_the_logprobs_of_given_tokens(real_engine, client, first_weights):
    """As the policy's own teacher, by the engine's own route; a cached prompt makes no difference."""
    for tokens in [*SEQUENCES, SEQUENCES[0]]:
        told = await client.logprobs(tokens)
        assert told.dtype == np.float32 and told[0] == 0
        assert np.abs(told[1:] - trainers(real_engine, tokens)).max() < 1e-4


async def test_a_server_is_asked_as_any_server_of_vllm_is(real_engine, client, first_weights):
    server = ReferenceServer(f"{real_engine.url}/v1", SERVED_NAME, real_engine.token, 4, 120)
    try:
        told = await asyncio.gather(*map(server.logprobs, SEQUENCES))
        for tokens, logprobs in zip(SEQUENCES, told, strict=True):
            assert np.abs(logprobs[1:] - trainers(real_engine, tokens)).max() < 1e-4
        said = await server.generate(
            SEQUENCES[0], max_tokens=12, temperature=1.0, seed=3, stop=[STOP], version=Version(1, 7)
        )
        whole = SEQUENCES[0] + said.tokens
        expected = trainers(real_engine, whole)[-len(said.tokens) :]
        assert np.abs(np.array(said.logprobs) - expected).max() < 1e-4
        assert [span.version for span in said.spans] == [Version(1, 7)] and len(said.tokens) <= 12
        again = await server.generate(
            SEQUENCES[0], max_tokens=12, temperature=1.0, seed=3, stop=[said.tokens[4]], version=Version(1, 7)
        )
        assert again.tokens == said.tokens[: said.tokens.index(said.tokens[4]) + 1]
        assert again.finish_reason == "stop"
    finally:
        await server.close()


async def test_a_sequence_that_is_too_long_is_refused(real_engine, client):
    server = ReferenceServer(real_engine.url, SERVED_NAME, real_engine.token, 4, 120)
    with pytest.raises(EngineError, match="256"):
        await client.logprobs([1] * 257)
    with pytest.raises(ReferenceFailed, match="256"):
        await server.logprobs([1] * 257)
    await server.close()
