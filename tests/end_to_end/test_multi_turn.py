"""Rollouts of several turns on a real engine that is updated meanwhile, and what the trainer sees of them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from engine_server import RealEngine
from msgspec.structs import replace
from small_runs import chat
from talks import NUMBERS, Plan, Talks, assert_trained_as_sampled, distance, talk
from trainer_runs import make_batches

from stackrl.runtime.environments import make
from stackrl.runtime.environments.reverse_text_tries import NO
from stackrl.runtime.orchestrator.rollout import Assignment, Limits
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.environments import Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAVE, EARLY = 32, 12
LIMITS = Limits(turn=48, sequence=256, seconds=300.0, temperature=0.7)
"""Two turns fill a block of the cache, which has 128 tokens; three fit the engine, which holds 256."""
TOLERANCE = 1e-4


def assignment(number: int) -> Assignment:
    environment = make(Environment(name="tries", type="reverse_text_tries", args={"letters": [3, 6]}))
    seeds = Seeds(0).branch("talk", number)
    return Assignment(number, 0, "tries", environment, environment.task(Random(number)), seeds)


@pytest.fixture(scope="module")
def talks(real_engine: RealEngine) -> Talks:
    plan = Plan(assignment, LIMITS, incarnation=5000, wave=WAVE, early=EARLY)
    return talk(real_engine, real_engine.versions.tensors, plan)


def test_the_talks_are_what_makes_it_hard(talks: Talks) -> None:
    """Several turns, ended by the model and cut off, cached, not to be told from their text, and updated."""
    assert all(rollout.turns == 3 for rollout in talks.rollouts)
    assert {generation.finish_reason for generation in talks.generations} == {"stop", "length"}
    assert any(generation.cached for generation in talks.generations)
    assert any(
        chat().answer(chat().text(g.tokens)) != g.tokens
        for g in talks.generations
        if g.finish_reason == "stop"
    )
    assert {(1, 2), (2, 3)} <= talks.updated, "no rollout was running during an update"


def test_every_sampled_token_is_trained_once_and_nothing_else(talks: Talks) -> None:
    assert len(talks.rollouts) == WAVE * len(NUMBERS)
    for rollout in talks.rollouts:
        turns = talks.turns[rollout.id]
        assert_trained_as_sampled(rollout, turns)
        for (prompt, generation, _), (later, _, _) in pairwise(turns):
            closed = generation.finish_reason == "stop"
            assert later[len(prompt) + len(generation.tokens) :] == chat().delta([NO])[closed:]

    said = sum(len(generation.tokens) for generation in talks.generations)
    batches = make_batches(talks.samples, ranks=2, capacity=512)
    trained = sum(int(part.loss_mask.sum()) for batch in batches for part in batch.micro_batches)
    assert said == trained == batches[0].tokens == sum(rollout.sampled for rollout in talks.rollouts)


@pytest.mark.parametrize("number", NUMBERS)
def test_logprobs_are_the_trainers_across_turns(real_engine: RealEngine, talks: Talks, number: int) -> None:
    whole = talks.whole(number)
    assert len(whole) >= EARLY
    assert distance(trainers(real_engine, number), whole) < TOLERANCE
    assert distance(trainers(real_engine, number % 3 + 1), whole) > 0.05
    assert distance(trainers(real_engine, number), [masked_one_early(sample) for sample in whole]) > 0.05


def masked_one_early(sample: Sample) -> Sample:
    """As if each turn had begun a token earlier, which only the turns' edges tell."""
    return replace(sample, loss_mask=np.roll(sample.loss_mask, -1))


def trainers(engine: RealEngine, number: int) -> Decoder:
    """The trainer's model with weights ``number``."""
    model = Decoder(shape_of(engine.run.model))
    model.load_state_dict(dict(engine.versions.tensors(number)))
    return model
