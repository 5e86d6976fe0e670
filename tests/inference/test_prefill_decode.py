"""One prefill and one decode engine, updated in the middle of requests, against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import pytest
import torch
from engine_pair import EnginePair, served
from engine_server import TOKEN

from stackrl.runtime.inference.answers import Generation
from stackrl.runtime.inference.disaggregation import missing
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.schemas.inference import PullWeights

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

TOLERANCE = 1e-4
UPDATES = 3
INCARNATION = iter(range(1, 1000))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    with served(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


class Run:
    """Engines that are served, and a trainer that publishes weights for them; step k has weights number k."""

    def __init__(self, pair: EnginePair, engines: Engines, publisher: PullPublisher) -> None:
        self.pair, self.engines, self.publisher = pair, engines, publisher
        self.incarnation = next(INCARNATION)
        self.events: list[tuple[str, dict]] = []

    async def update(self, step: int) -> None:
        version = Version(self.incarnation, step)
        tensors = self.pair.versions.tensors(step)
        await asyncio.to_thread(self.publisher.publish, version, tensors)
        self.engines.aim(version, self.publisher.source)
        await self.engines.holding(version, 120)

    async def ask(self, prompt: list[int], seed: int, max_tokens: int = 200) -> Generation:
        async with self.engines.serving(seed) as generate:
            return await generate(
                prompt,
                max_tokens=max_tokens,
                temperature=1.0,
                seed=seed,
                stop=[],
                request=f"it-{seed}",
                routes_from=0,
            )

    def distance(self, prompt: list[int], said: Generation, kv: str, shift: int = 0, **rule) -> float:
        """The largest distance of the logprobs from those of transformers, by labels moved by ``shift``."""
        spans = [(span.start, span.end, span.version.step + shift) for span in said.spans]
        prefilled = {"prefilled": said.prefilled.step} if kv == "keep" else {}
        expected = self.pair.versions.logprobs(prompt, said.tokens, spans, kv=kv, **{**prefilled, **rule})
        return float((expected - torch.tensor(said.logprobs, dtype=torch.float64)).abs().max())


@asynccontextmanager
async def running(pair: EnginePair, kv: str = "keep") -> AsyncIterator[Run]:
    clients = pair.clients()
    engines = Engines(clients, 16, PullWeights(kv=kv, timeout=120.0), silence=60.0)
    publisher = PullPublisher("127.0.0.1", 0, TOKEN)
    run = Run(pair, engines, publisher)
    task = asyncio.create_task(engines.serve(lambda name, **fields: run.events.append((name, fields)), 120))
    yield run
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.close()
    for client in clients:
        await client.close()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_every_logprob_is_that_of_its_label(pair: EnginePair, kv: str) -> None:
    """Conversations of several turns go on over all updates; those that share a prompt share its keys."""
    replies: list[tuple[list[int], Generation]] = []
    ends = asyncio.Event()

    async def converse(lane: int) -> None:
        random = Random(lane // 2)
        for talk in range(1000):
            prompt = [random.randrange(256) for _ in range(150 + 60 * (lane // 2))]
            for turn in range(2):
                if ends.is_set():
                    return
                said = await run.ask(prompt, seed=lane + 100 * (10 * talk + turn))
                replies.append((prompt, said))
                prompt = [*prompt, *said.tokens, *range(turn, turn + 20)]

    async with running(pair, kv) as run:
        decode = pair.clients()[1]
        moved = await decode.fetched_bytes()
        await run.update(1)
        talking = [asyncio.create_task(converse(lane)) for lane in range(6)]
        for step in range(2, 20):
            await asyncio.sleep(1.0)
            await run.update(step)
            if len(crossings(replies)) >= UPDATES and step > UPDATES:
                break
        ends.set()
        await asyncio.gather(*talking)
        moved = await decode.fetched_bytes() - moved
        await decode.close()

        crossed = crossings(replies)
        assert len(crossed) >= UPDATES, "no request was running during an update"
        for prompt, said in replies:
            assert run.distance(prompt, said, kv) < TOLERANCE
        other = {"keep": "recompute", "recompute": "keep"}[kv]
        for prompt, said in crossed.values():
            assert run.distance(prompt, said, kv, shift=1) > 0.05
            assert run.distance(prompt, said, other) > 10 * TOLERANCE
        new = sum(len(prompt) - said.cached for prompt, said in replies)
        assert moved >= new * bytes_per_token(pair)


def crossings(
    replies: list[tuple[list[int], Generation]],
) -> dict[tuple[int, int], tuple[list[int], Generation]]:
    """A reply for each pair of versions between which one was running."""
    found = {}
    for prompt, said in replies:
        for older, newer in pairwise(span.version.step for span in said.spans):
            found[older, newer] = (prompt, said)
    return found


def bytes_per_token(pair: EnginePair) -> int:
    """Of keys and values in float32."""
    config = pair.versions.model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


async def test_a_prompt_of_the_older_version_keeps_its_keys_where_a_newer_one_answers(
    pair: EnginePair,
) -> None:
    """What the orchestrator does not let happen, and what the rule says of it."""
    async with running(pair) as run:
        await run.update(1)
        first, second = pair.clients()
        prompt = [Random(7).randrange(256) for _ in range(300)]
        prefilled = await first.prefill(prompt, salt=f"{run.incarnation}.1", request_id="older")
        version = Version(run.incarnation, 2)
        await asyncio.to_thread(run.publisher.publish, version, pair.versions.tensors(2))
        await second.update(version, run.publisher.source, "keep", 120)
        said = await second.generate(
            prompt,
            max_tokens=40,
            temperature=1.0,
            seed=0,
            salt=f"{run.incarnation}.1",
            stop_token_ids=[],
            request_id="older",
            prefilled=prefilled,
        )
        assert said.prefilled.step == 1 and [span.version.step for span in said.spans] == [2]
        assert run.distance(prompt, said, "keep") < TOLERANCE
        assert run.distance(prompt, said, "keep", prefilled=2) > 10 * TOLERANCE
        for client in (first, second):
            await client.close()
