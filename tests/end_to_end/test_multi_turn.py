"""Rollouts of several turns on a real engine that is updated meanwhile, and what the trainer sees of them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_server import RealEngine
from msgspec.structs import replace
from small_runs import chat
from trainer_runs import make_batches

from stackrl.runtime.environments import make
from stackrl.runtime.environments.reverse_text_tries import NO
from stackrl.runtime.inference.client import Engine, Generation
from stackrl.runtime.orchestrator.batching import document_names, micro_batch
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, roll_out
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.trainer.step import prepare
from stackrl.runtime.transport.messages import Sample, Span, Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.schemas.environments import Environment
from stackrl.schemas.inference import PullWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUMBERS = (1, 2, 3)
"""The engine gets the weights of these numbers, one after the other."""
WAVE, EARLY = 32, 12
"""Rollouts that begin on each, and how many of those have ended when the next weights come."""
LIMITS = Limits(turn=48, sequence=256, seconds=300.0, temperature=0.7)
"""Two turns fill a block of the cache, which has 128 tokens; three fit the engine, which holds 256."""
INCARNATION = 5000
"""Of no other test on this engine: its cache keeps their prompts under their versions."""
TOLERANCE = 1e-4


class Recorder(Engine):
    """An engine whose requests are kept: prompt and reply of every turn, by rollout."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token, timeout=120)
        self.turns: dict[str, list[tuple[list[int], Generation]]] = defaultdict(list)

    async def generate(self, tokens: Sequence[int], **request: Any) -> Generation:
        prompt = list(tokens)
        generation = await super().generate(prompt, **request)
        group, number, *_ = request["request_id"].split("-")
        self.turns[f"{group}-{number}"].append((prompt, generation))
        return generation


@dataclass
class Talks:
    """All rollouts, and what the engine was asked and said in each."""

    rollouts: list[Rollout]
    turns: dict[str, list[tuple[list[int], Generation]]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]


@pytest.fixture(scope="module")
def talks(real_engine: RealEngine) -> Talks:
    return asyncio.run(_talk(real_engine))


async def _talk(real_engine: RealEngine) -> Talks:
    """Roll out as an RL stage does, and update the engine while it is busy."""
    recorder = Recorder(real_engine.url, real_engine.token)
    engines = Engines([recorder], real_engine.run.stack().inference.max_requests, PullWeights())
    publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    finished: list[Rollout] = []

    async def publish(step: int) -> None:
        version = Version(INCARNATION, step)
        await asyncio.to_thread(publisher.publish, version, real_engine.versions.tensors(step))
        engines.aim(version, publisher.source)
        await engines.holding(version, 120)

    async def take(number: int) -> None:
        async with engines.serving(number) as generate:
            finished.append(await roll_out(assignment(number), chat(), generate, LIMITS))

    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(engines.serve(lambda name, **fields: None, 60))
            waves: list[asyncio.Task[None]] = []
            for number in NUMBERS:
                await publish(number)
                wave = [tasks.create_task(take(len(waves) + i)) for i in range(WAVE)]
                for early in islice(asyncio.as_completed(wave), EARLY):
                    await early
                waves += wave
            await asyncio.gather(*waves)
            serving.cancel()
    finally:
        publisher.close()
        await recorder.close()
    return Talks(finished, recorder.turns)


def assignment(number: int) -> Assignment:
    environment = make(Environment(name="tries", type="reverse_text_tries", args={"letters": [3, 6]}))
    seeds = Seeds(0).branch("talk", number)
    return Assignment(number, 0, "tries", environment, environment.task(Random(number)), seeds)


def test_the_talks_are_what_makes_it_hard(talks: Talks) -> None:
    """Several turns, ended by the model and cut off, cached, not to be told from their text, and updated."""
    generations = [generation for turns in talks.turns.values() for _, generation in turns]
    assert all(rollout.turns == 3 for rollout in talks.rollouts)
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}
    assert any(generation.cached for generation in generations)
    assert any(
        chat().answer(chat().text(g.tokens)) != g.tokens for g in generations if g.finish_reason == "stop"
    )
    between = {
        pair for sample in talks.samples for pair in pairwise(span.version.step for span in sample.spans)
    }
    assert {(1, 2), (2, 3)} <= between, "no rollout was running during an update"


def test_every_sampled_token_is_trained_once_and_nothing_else(talks: Talks) -> None:
    assert len(talks.rollouts) == WAVE * len(NUMBERS)
    for rollout in talks.rollouts:
        assert rollout.prefix_breaks == 0
        [sample] = rollout.samples
        sampled: list[int] = []
        spans: list[Span] = []
        for prompt, generation in talks.turns[rollout.id]:
            start, end = len(prompt), len(prompt) + len(generation.tokens)
            assert sample.tokens[:end].tolist() == prompt + generation.tokens
            assert sample.logprobs[start:end].tolist() == np.float32(generation.logprobs).tolist()
            sampled += range(start, end)
            spans += [Span(start + s.start, start + s.end, s.version) for s in generation.spans]
        for (prompt, generation), (later, _) in pairwise(talks.turns[rollout.id]):
            closed = generation.finish_reason == "stop"
            assert later[len(prompt) + len(generation.tokens) :] == chat().delta([NO])[closed:]
        assert np.flatnonzero(sample.loss_mask).tolist() == sampled
        assert sample.spans == spans
        assert not sample.logprobs[sample.loss_mask == 0].any()

    said = sum(len(generation.tokens) for turns in talks.turns.values() for _, generation in turns)
    batches = make_batches(talks.samples, ranks=2, capacity=512)
    trained = sum(int(part.loss_mask.sum()) for batch in batches for part in batch.micro_batches)
    assert said == trained == batches[0].tokens == sum(rollout.sampled for rollout in talks.rollouts)


@pytest.mark.parametrize("number", NUMBERS)
def test_logprobs_are_the_trainers_across_turns(real_engine: RealEngine, talks: Talks, number: int) -> None:
    whole = [sample for sample in talks.samples if {span.version.step for span in sample.spans} == {number}]
    assert len(whole) >= EARLY
    assert distance(real_engine, number, whole) < TOLERANCE
    assert distance(real_engine, number % 3 + 1, whole) > 0.05
    assert distance(real_engine, number, [masked_one_early(sample) for sample in whole]) > 0.05


def masked_one_early(sample: Sample) -> Sample:
    """As if each turn had begun a token earlier, which only the turns' edges tell."""
    return replace(sample, loss_mask=np.roll(sample.loss_mask, -1))


@torch.no_grad()
def distance(engine: RealEngine, number: int, samples: Sequence[Sample]) -> float:
    """The largest distance of the samples' logprobs from the trainer's, which has weights ``number``.

    They go the way of a batch: packed by the orchestrator, and read by the trainer's own step and model.
    """
    model = Decoder(shape_of(engine.run.model))
    model.load_state_dict(dict(engine.versions.tensors(number)))
    micro = prepare(micro_batch(samples, document_names(samples)), torch.device("cpu"))
    logprobs, _ = model(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)
    return float((logprobs - micro.engine_logprobs).abs().max())
