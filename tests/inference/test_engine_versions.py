"""Weight updates in flight on real engines: each logprob is that of the version that its label names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
import torch
from engine_server import RealEngine

from stackrl.runtime.inference.client import Engine, EngineError, Generation
from stackrl.runtime.transport.folder import FolderPublisher
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.runtime.transport.weights import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
INCARNATION = iter(range(1, 1000))
every_model = pytest.mark.parametrize(
    "real_engine",
    [
        pytest.param("qwen3-moe-tied", id="tied moe"),
        pytest.param(None, id="qwen3"),
        pytest.param("qwen3-moe", id="moe", marks=pytest.mark.nightly),
        pytest.param("qwen3-tied", id="tied", marks=pytest.mark.nightly),
    ],
    indirect=True,
)

each_way = pytest.mark.parametrize(
    ("real_engine", "way"),
    [
        ("qwen3-moe-tied", ("pull", "keep")),
        ("qwen3-moe-tied", ("pull", "recompute")),
        ("qwen3-moe-tied", ("folder", "keep")),
        (None, ("pull", "keep")),
        *(
            pytest.param(kind, way, marks=pytest.mark.nightly)
            for kind in ("qwen3-moe", "qwen3-tied", None)
            for way in (("pull", "keep"), ("pull", "recompute"), ("folder", "keep"))
            if (kind, way) != (None, ("pull", "keep"))
        ),
    ],
    indirect=True,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value or "qwen3",
)


class Trainer:
    """Publishes versions of the engine's model; step k of a test has the weights number k."""

    def __init__(self, engine: RealEngine, publisher: Publisher) -> None:
        self.engine, self.publisher, self.incarnation = engine, publisher, next(INCARNATION)

    def publish(self, step: int, without: str | None = None) -> Version:
        version = Version(self.incarnation, step)
        tensors = self.engine.versions.tensors(step)
        self.publisher.publish(version, [(name, tensor) for name, tensor in tensors if name != without])
        return version

    async def update(self, client: Engine, step: int, kv: str = "keep") -> None:
        version = await asyncio.to_thread(self.publish, step)
        await client.update(version, self.publisher.source, kv, 120)


@pytest.fixture(scope="session")
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """How weights travel, and what becomes of cached keys. Of the session, as the engine is: pytest ends a
    fixture that has parameters as early as the shortest-lived of those that have theirs in the same list."""
    return getattr(request, "param", ("pull", "keep"))


@pytest.fixture
def trainer(real_engine: RealEngine, way: tuple[str, str], tmp_path) -> Iterator[Trainer]:
    transport, _ = way
    if transport == "folder":
        publisher = FolderPublisher(tmp_path)
    else:
        publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    yield Trainer(real_engine, publisher)
    publisher.close()


async def ask(
    client: Engine,
    prompt: list[int],
    *,
    max_tokens: int = 40,
    salt: str,
    seed: int = 0,
    temperature: float = 1.0,
) -> Generation:
    return await client.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        salt=salt,
        stop_token_ids=[],
        request_id=f"{salt}-{seed}",
    )


def numbered(generation: Generation, shift: int = 0) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.version.step + shift) for span in generation.spans]


def distance(
    engine: RealEngine, prompt: list[int], generation: Generation, kv: str, shift: int = 0, **rule
) -> float:
    """The largest distance of the logprobs from those of transformers, by labels moved by ``shift``."""
    expected = engine.versions.logprobs(prompt, generation.tokens, numbered(generation, shift), kv=kv, **rule)
    return float((expected - torch.tensor(generation.logprobs, dtype=torch.float64)).abs().max())


class Traffic:
    """Requests that follow one another while the engine is updated; ``replies`` holds prompts and replies."""

    def __init__(self, client: Engine, salt: str, width: int = 4) -> None:
        self._client, self._salt, self._width = client, salt, width
        self._ends = False
        self.replies: list[tuple[list[int], Generation]] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._ask_on(lane)) for lane in range(self._width)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, lane: int) -> None:
        for turn in range(1000):
            if self._ends:
                return
            prompt = [lane, turn % 250, *range(40, 60 + lane)]
            reply = await ask(self._client, prompt, max_tokens=200, salt=self._salt, seed=lane + 10 * turn)
            self.replies.append((prompt, reply))

    def crossed(self) -> dict[tuple[int, int], tuple[list[int], Generation]]:
        """A reply for each pair of versions between which one was running."""
        found = {}
        for prompt, reply in self.replies:
            for older, newer in pairwise(span.version.step for span in reply.spans):
                found[older, newer] = (prompt, reply)
        return found


@each_way
async def test_every_logprob_is_that_of_its_label(
    real_engine: RealEngine, client: Engine, trainer: Trainer, way: tuple[str, str]
) -> None:
    _, kv = way
    await trainer.update(client, 1, kv)
    async with Traffic(client, salt=f"{trainer.incarnation}.1") as traffic:
        for step in range(2, 14):
            await asyncio.sleep(0.6)  # requests begin that know no older version
            await trainer.update(client, step, kv)
            if step >= 4 and len(traffic.crossed()) >= 3:
                break
    again = traffic.replies[0][0]
    late = await ask(client, again, salt=f"{trainer.incarnation}.{step}", seed=99)

    crossed = traffic.crossed()
    assert len(crossed) >= 3, "no request was running during an update"
    assert await client.version() == Version(trainer.incarnation, step)
    assert numbered(late) == [(0, 40, step)]
    for prompt, reply in [*traffic.replies, (again, late)]:
        assert distance(real_engine, prompt, reply, kv) < TOLERANCE

    other = {"keep": "recompute", "recompute": "keep"}[kv]
    for prompt, reply in crossed.values():
        assert distance(real_engine, prompt, reply, kv, shift=1) > 0.05
        assert distance(real_engine, prompt, reply, kv, shift=-1) > 0.05
        assert distance(real_engine, prompt, reply, other) > 10 * TOLERANCE
        if kv == "keep":
            assert distance(real_engine, prompt, reply, kv, newer_keys_from=-2) > TOLERANCE


@every_model
async def test_an_update_without_one_tensor_fails_and_can_be_repeated(
    real_engine: RealEngine, client: Engine, trainer: Trainer
) -> None:
    await trainer.update(client, 1)
    prompt = list(range(50, 80))
    names = [name for name, _ in real_engine.versions.tensors(0)]
    for step, name in enumerate(one_of_each_kind(names), start=2):
        with pytest.raises(EngineError, match="the trainer did not send every tensor"):
            await client.update(trainer.publish(step, without=name), trainer.publisher.source, "keep", 120)
        with pytest.raises(EngineError, match="of no version since an update failed"):
            await client.version()
        with pytest.raises(EngineError, match="of no version since an update failed"):
            await ask(client, prompt, salt="broken")
    await trainer.update(client, 50)
    generation = await ask(client, prompt, salt=f"{trainer.incarnation}.50")
    assert distance(real_engine, prompt, generation, "keep") < TOLERANCE


def one_of_each_kind(names: Iterable[str]) -> list[str]:
    """A tensor of each kind that a model has: of layer 1, of expert 3."""
    outside = [name for name in names if "layers" not in name]
    inside = [
        name for name in names if ".layers.1." in name and (".experts." not in name or ".experts.3." in name)
    ]
    return outside + inside


async def test_a_missing_tensor_makes_the_logprobs_wrong_where_nothing_checks(
    real_engine: RealEngine, client: Engine, trainer: Trainer
) -> None:
    """The comparison sees a tensor that kept its old weights by itself, without the receiver's check."""
    await trainer.update(client, 1)
    prompt = list(range(50, 80))
    stale = "model.layers.1.self_attn.k_proj.weight"
    old = dict(real_engine.versions.tensors(1))[stale].clone()
    mixed = [(name, old if name == stale else tensor) for name, tensor in real_engine.versions.tensors(2)]
    trainer.publisher.publish(Version(trainer.incarnation, 2), mixed)
    await client.update(Version(trainer.incarnation, 2), trainer.publisher.source, "keep", 120)
    generation = await ask(client, prompt, salt=f"{trainer.incarnation}.2")
    assert distance(real_engine, prompt, generation, "keep") > 10 * TOLERANCE


@every_model
async def test_each_update_moves_the_probe(real_engine: RealEngine, client: Engine, trainer: Trainer) -> None:
    probe = [3, 14, 15, 92, 65, 35, 89, 79]
    scores = []
    for step in (1, 2, 3):
        await trainer.update(client, step)
        scores.append(await engine_scores(client, probe, salt=f"{trainer.incarnation}.{step}"))
        expected = real_engine.versions.logprobs(
            probe[:1], probe[1:], [(0, len(probe) - 1, step)], kv="recompute"
        )
        assert float((scores[-1] - expected).abs().max()) < TOLERANCE
    assert all(float((new - old).abs().max()) >= 0.05 for old, new in pairwise(scores))


async def engine_scores(client: Engine, probe: list[int], salt: str) -> torch.Tensor:
    """The engine's own logprobs of the given tokens after the first."""
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    body = {"model": "policy", "token_ids": probe, "cache_salt": salt, "sampling_params": sampling}
    answer = await client._call("POST", "/inference/v1/generate", body, 60)
    entries = zip(probe[1:], answer["prompt_logprobs"][1:], strict=True)
    return torch.tensor([entry[str(token)]["logprob"] for token, entry in entries], dtype=torch.float64)


async def test_a_cached_prompt_is_reused_within_a_salt_only(
    real_engine: RealEngine, client: Engine, trainer: Trainer
) -> None:
    """With `keep`, a request with the older salt starts on the older version's keys; a new salt does not."""
    prompt = [(7 * position) % 250 for position in range(200)]
    block = 128  # vLLM on CPU caches whole blocks of so many tokens
    await trainer.update(client, 1)
    await ask(client, prompt, max_tokens=1, salt="older")
    await trainer.update(client, 2)
    older = await ask(client, prompt, salt="older")
    newer = await ask(client, prompt, salt="newer")
    assert (older.cached, newer.cached) == (block, 0)
    assert numbered(older) == numbered(newer) == [(0, 40, 2)]
    assert distance(real_engine, prompt, newer, "keep") < TOLERANCE
    assert distance(real_engine, prompt, older, "keep") > 10 * TOLERANCE
    inherited = [
        (0, block - 100 + 1, 1),
        (block - 100 + 1, 140, 2),
    ]  # as if the prompt's end had been sampled
    expected = real_engine.versions.logprobs(prompt[:100], prompt[100:] + older.tokens, inherited, kv="keep")[
        100:
    ]
    assert float((expected - torch.tensor(older.logprobs)).abs().max()) < TOLERANCE

    await trainer.update(client, 3, "recompute")
    cleared = await ask(client, prompt, salt="newer")
    assert cleared.cached == 0
    assert distance(real_engine, prompt, cleared, "recompute") < TOLERANCE


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_requests_that_wait_for_a_place_are_wholly_of_the_new_version(
    real_engine: RealEngine, client: Engine, trainer: Trainer, kv: str
) -> None:
    await trainer.update(client, 1)
    salt = f"{trainer.incarnation}.1"
    prompts = [[seed, *range(40, 70)] for seed in range(64)]  # 16 run at once
    tasks = [
        asyncio.create_task(ask(client, prompt, max_tokens=100, salt=salt, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    await asyncio.sleep(0.2)
    await trainer.update(client, 2, kv)
    generations = await asyncio.gather(*tasks)
    waited = [generation for generation in generations if numbered(generation) == [(0, 100, 2)]]
    assert len(waited) >= 20
    for prompt, generation in list(zip(prompts, generations, strict=True))[::2]:
        assert distance(real_engine, prompt, generation, kv) < TOLERANCE


async def test_a_version_that_is_gone_is_an_error_that_says_so(client: Engine, trainer: Trainer) -> None:
    first = trainer.publish(1)
    await client.update(first, trainer.publisher.source, "keep", 120)
    trainer.publish(2)
    trainer.publish(3)
    with pytest.raises(
        EngineError, match=f"weight version {first} is gone, {trainer.incarnation}.3 is the newest"
    ):
        await client.update(first, trainer.publisher.source, "keep", 120)
    await client.update(Version(trainer.incarnation, 3), trainer.publisher.source, "keep", 120)
    assert await client.version() == Version(trainer.incarnation, 3)
