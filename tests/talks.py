"""Rollouts of several turns on a real engine that gets new weights meanwhile, and what was said in them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_server import RealEngine
from small_runs import chat

from stackrl.runtime.environments.workers import close_workers
from stackrl.runtime.inference.client import Engine, Generation
from stackrl.runtime.orchestrator.batching import document_names, micro_batch
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.groups import Rollout
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, roll_out_somewhere
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.step import prepare
from stackrl.runtime.transport.messages import Sample, Span, Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.schemas.inference import PullWeights

NUMBERS = (1, 2, 3)
"""The engine gets the weights of these numbers, one after the other."""


class Turn(NamedTuple):
    """What the engine was asked and said."""

    prompt: list[int]
    generation: Generation
    salt: str
    """Of the cache: the version that the engine held when it was asked."""


class Recorder(Engine):
    """An engine whose requests are kept: the turns of each rollout."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token, timeout=120)
        self.turns: dict[str, list[Turn]] = defaultdict(list)

    async def generate(self, tokens: Sequence[int], **request: Any) -> Generation:
        prompt = list(tokens)
        generation = await super().generate(prompt, **request)
        group, number, *_ = request["request_id"].split("-")
        self.turns[f"{group}-{number}"].append(Turn(prompt, generation, request["salt"]))
        return generation


@dataclass
class Talks:
    """All rollouts, and what the engine was asked and said in each."""

    rollouts: list[Rollout]
    turns: dict[str, list[Turn]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for rollout in self.rollouts for sample in rollout.samples]

    @property
    def generations(self) -> list[Generation]:
        return [generation for turns in self.turns.values() for _, generation, _ in turns]

    def whole(self, number: int) -> list[Sample]:
        """Those that were sampled by the weights of one number alone."""
        return [s for s in self.samples if {span.version.step for span in s.spans} == {number}]

    @property
    def updated(self) -> set[tuple[int, int]]:
        """Pairs of numbers that follow each other within a rollout."""
        return {
            pair for sample in self.samples for pair in pairwise(span.version.step for span in sample.spans)
        }


@dataclass(frozen=True)
class Plan:
    """What is rolled out."""

    assignment: Callable[[int], Assignment]
    """By the number of the rollout."""
    limits: Limits
    incarnation: int
    """Of no other test on the engine: its cache keeps their prompts under their versions."""
    wave: int
    """Rollouts that begin on each of NUMBERS."""
    early: int
    """How many of those have ended when the next weights come."""


def talk(real_engine: RealEngine, weights: Callable[[int], Iterable[Any]], plan: Plan) -> Talks:
    """Roll out as an RL stage does, and update the engine with ``weights`` of NUMBERS while it is busy."""
    return asyncio.run(_talk(real_engine, weights, plan))


async def _talk(real_engine: RealEngine, weights: Callable[[int], Iterable[Any]], plan: Plan) -> Talks:
    recorder = Recorder(real_engine.url, real_engine.token)
    engines = Engines([recorder], real_engine.run.stack().inference.max_requests, PullWeights())
    publisher = PullPublisher("127.0.0.1", 0, real_engine.token)
    finished: list[Rollout] = []

    async def publish(step: int) -> None:
        version = Version(plan.incarnation, step)
        await asyncio.to_thread(publisher.publish, version, weights(step))
        engines.aim(version, publisher.source)
        await engines.holding(version, 120)

    async def take(number: int) -> None:
        what = plan.assignment(number)
        finished.append(await roll_out_somewhere(what, chat(), engines, plan.limits))

    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(engines.serve(lambda name, **fields: None, 60))
            waves: list[asyncio.Task[None]] = []
            for number in NUMBERS:
                await publish(number)
                wave = [tasks.create_task(take(len(waves) + i)) for i in range(plan.wave)]
                for early in islice(asyncio.as_completed(wave), plan.early):
                    await early
                waves += wave
            await asyncio.gather(*waves)
            serving.cancel()
    finally:
        await close_workers()
        publisher.close()
        await recorder.close()
    return Talks(finished, recorder.turns)


def assert_trained_as_sampled(rollout: Rollout, turns: Sequence[Turn]) -> None:
    """One sequence, which every turn extends, whose trained tokens are those that the engine sampled."""
    assert rollout.prefix_breaks == 0
    assert rollout.turns == len(turns)
    [sample] = rollout.samples
    sampled: list[int] = []
    spans: list[Span] = []
    for prompt, generation, _ in turns:
        start, end = len(prompt), len(prompt) + len(generation.tokens)
        assert sample.tokens[:end].tolist() == prompt + generation.tokens
        assert sample.logprobs[start:end].tolist() == np.float32(generation.logprobs).tolist()
        sampled += range(start, end)
        spans += [Span(start + s.start, start + s.end, s.version) for s in generation.spans]
    assert np.flatnonzero(sample.loss_mask).tolist() == sampled
    assert sample.spans == spans
    assert not sample.logprobs[sample.loss_mask == 0].any()


@torch.no_grad()
def distance(model: Decoder, samples: Sequence[Sample]) -> float:
    """The largest distance of the samples' logprobs from those of the trainer's ``model``.

    They go the way of a batch: packed by the orchestrator, and read by the trainer's own step and model.
    """
    micro = prepare(micro_batch(samples, document_names(samples)), torch.device("cpu"))
    logprobs, _ = model(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)
    return float((logprobs - micro.engine_logprobs).abs().max())
