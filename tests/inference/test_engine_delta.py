"""A real engine is brought from version to version by what changed alone, and samples from each exactly."""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_server import RealEngine
from tiny_models import Versions
from transformers import PreTrainedModel

from stackrl.runtime.inference.client import Engine
from stackrl.runtime.transport.folder import FolderPublisher
from stackrl.runtime.transport.held_folder import held_path
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.runtime.transport.weights import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
INCARNATION = itertools.count(3000)
each_way = pytest.mark.parametrize(
    ("real_engine", "transport"),
    [
        (None, "pull"),
        *(
            pytest.param(kind, transport, marks=pytest.mark.nightly)
            for kind in (None, "qwen3-tied", "qwen3-moe-tied", "qwen3-moe", "glm4-moe")
            for transport in ("pull", "folder")
            if (kind, transport) != (None, "pull")
        ),
    ],
    indirect=True,
)


class SmallSteps(Versions):
    """Each version differs from the first, and so from its neighbours, in few of the weights."""

    def set(self, number: int) -> PreTrainedModel:
        if number != self._number:
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for name, tensor in self.model.named_parameters():
                    moved = torch.rand(tensor.shape, generator=generator) < (0.05 if number else 0)
                    tensor.copy_(torch.where(moved, -1.5 * self._first[name], self._first[name]))
            self._number = number
        return self.model

    def tensors(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """With what is trained without a gradient: the bias of the choice of experts."""
        buffers = self.set(number).named_buffers()
        return super().tensors(number) + [pair for pair in buffers if pair[0].endswith("correction_bias")]


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> str:
    """Of the session, as the engine is, so that pytest does not end the engine for each."""
    return request.param


@pytest.fixture
def publisher(real_engine: RealEngine, transport: str, tmp_path: Path) -> Iterator[Publisher]:
    if transport == "folder":
        made = FolderPublisher(tmp_path, delta=True)
    else:
        made = PullPublisher("127.0.0.1", 0, real_engine.token, delta=True)
    yield made
    made.close()


@each_way
async def test_what_changed_makes_the_newer_version(
    real_engine: RealEngine, client: Engine, publisher: Publisher
) -> None:
    steps = SmallSteps(copy.deepcopy(real_engine.versions.set(0)))
    incarnation = next(INCARNATION)
    log = real_engine.log.stat().st_size
    for step in (1, 2, 3, 4):
        version = Version(incarnation, step)
        published = await asyncio.to_thread(publisher.publish, version, steps.tensors(step))
        assert step == 1 or published.sent < 0.5 * published.whole
        if step == 3:
            continue  # the engine is one behind, and takes two at once
        await client.update(version, publisher.source, "keep", 120)
        prompt = [step, *range(40, 70)]
        reply = await client.generate(
            prompt,
            max_tokens=40,
            temperature=1.0,
            seed=step,
            salt=str(version),
            stop_token_ids=[],
            request_id=str(version),
        )
        assert [span.version for span in reply.spans] == [version]
        of = [
            steps.logprobs(prompt, reply.tokens, [(0, 40, number)], kv="keep") for number in (step, step - 1)
        ]
        found = torch.tensor(reply.logprobs, dtype=torch.float64)
        assert float((of[0] - found).abs().max()) < TOLERANCE
        assert float((of[1] - found).abs().max()) > 100 * TOLERANCE
    assert (held_path(real_engine.run.path, 0) / "manifest").exists()
    with real_engine.log.open() as file:
        file.seek(log)
        said = file.read()
    assert "ERROR" not in said
    assert len(re.findall(r"weight version [\d.]+: \d+ of \d+ bytes fetched", said)) == 3
