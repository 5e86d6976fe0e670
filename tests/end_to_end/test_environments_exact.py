"""Environments of many turns on a real engine, played by a model that has seen how, and the trainer.

The engine gets the weights of a model that goes on learning meanwhile, so that some turns, and some answers,
are of two versions.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from engine_server import LONG, RealEngine
from rank_processes import alone
from small_runs import chat
from talks import NUMBERS, Plan, Talks, Turn, assert_trained_as_sampled, distance, talk
from tiny_models import Versions
from torch import Tensor
from trainer_runs import make_batches, make_stack

from stackrl.runtime.environments import make
from stackrl.runtime.orchestrator.rollout import Assignment, Limits
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.supervised import Demonstrations
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.trainer.models.model import model_of
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.environments import Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
MORE = 8
"""Steps of learning between the weights of one number and those of the next."""


@dataclass(frozen=True)
class Game:
    """An environment, and how it is played."""

    environment: dict[str, Any]
    turn: int
    """Tokens of an answer."""
    sequence: int
    shown: int
    """Steps of learning from demonstrations before it is played: it is to make mistakes yet."""
    at_once: int
    """Demonstrations of a step."""
    turns: int
    """That some rollouts have at least."""
    wave: int
    incarnation: int
    seen: tuple[str, ...] = field(default=())
    """Metrics that are not 0 in all rollouts: what is to be tried is tried."""

    @property
    def described(self) -> Environment:
        return Environment.model_validate({"name": "game"} | self.environment)

    @property
    def limits(self) -> Limits:
        return Limits(self.turn, self.sequence, seconds=300.0, temperature=1.0)

    def assignment(self, number: int) -> Assignment:
        environment = make(self.described)
        seeds = Seeds(0).branch("game", number)
        return Assignment(number, 0, "game", environment, environment.task(Random(number)), seeds)


GAMES = {
    "wordle": Game(
        {"type": "wordle", "args": {"words": 30, "guesses": 6, "rules": False}},
        turn=9,
        sequence=256,
        shown=40,
        at_once=16,
        turns=6,
        wave=24,
        incarnation=6001,
        seen=("guesses", "unreadable"),
    ),
    "tool_use": Game(
        {"type": "tool_use", "args": {"goods": 1, "largest": 9, "turns": 5}},
        turn=110,
        sequence=2048,
        shown=160,
        at_once=6,
        turns=3,
        wave=16,
        incarnation=6002,
        seen=("calls", "bad_calls"),
    ),
    "swe": Game(
        {
            "type": "swe",
            "args": {
                "dataset": "miniature",
                "actions": "blocks",
                "turns": 6,
                "output": 300,
                "test_timeout": 60.0,
                "sandbox": {"type": "bubblewrap", "memory": "512MiB", "processes": 64, "timeout": 20.0},
            },
        },
        turn=400,
        sequence=2048,
        shown=120,
        at_once=4,
        turns=3,
        wave=12,
        incarnation=6003,
        seen=("commands", "malformed"),
    ),
}


class Pupil(Versions):
    """A trainer's model that learns from demonstrations: NUMBERS are its weights after more and more."""

    def __init__(self, engine: RealEngine, game: Game) -> None:
        super().__init__(deepcopy(engine.versions.model))
        model = model_of(engine.run.model)
        folder.load(model, engine.run.model)
        self.weights: dict[int, dict[str, Tensor]] = {}
        stack = _stack(game)
        learner, source = Learner(stack, model), Demonstrations(stack.stages[0], stack, chat())
        for step in range(stack.stages[0].steps):
            [batch] = make_batches(source.work(step).samples, index=step, stage="shown", stage_step=step)
            learner.apply(batch)
            number, rest = divmod(step + 1 - game.shown, MORE)
            if number >= 0 and not rest:
                self.weights[number + 1] = deepcopy(model.state_dict())

    def set(self, number: int) -> Any:
        self.model.load_state_dict(self.weights[number])
        return self.model

    def tensors(self, number: int) -> list[tuple[str, Tensor]]:
        return list(self.weights[number].items())

    def trainers(self, engine: RealEngine, number: int) -> Decoder:
        """The trainer's model with these weights."""
        model = Decoder(shape_of(engine.run.model))
        model.load_state_dict(self.weights[number])
        return model


def _stack(game: Game) -> Any:
    steps = game.shown + MORE * (len(NUMBERS) - 1)
    stage = {"name": "shown", "type": "supervised", "steps": steps, "batch_size": game.at_once}
    optimizer = {"learning_rate": 3e-3, "betas": [0.9, 0.95], "warmup_steps": 10}
    return make_stack(
        trainer={"sequence_length": game.sequence},
        environments=[game.described],
        stages=[stage | {"optimizer": optimizer}, {"name": "main", "type": "rl", "steps": 1}],
    )


@pytest.fixture(scope="session")
def game(request: pytest.FixtureRequest) -> Game:
    return GAMES[request.param]


@pytest.fixture(scope="module")
def pupil(real_engine: RealEngine, game: Game) -> Pupil:
    with alone():
        return Pupil(real_engine, game)


@pytest.fixture(scope="module")
def talks(real_engine: RealEngine, game: Game, pupil: Pupil) -> Talks:
    plan = Plan(game.assignment, game.limits, game.incarnation, game.wave, early=game.wave // 3)
    return talk(real_engine, pupil.tensors, plan)


every_game = pytest.mark.parametrize(
    ("real_engine", "game"),
    [
        pytest.param(None, "wordle", id="wordle"),
        pytest.param(LONG, "tool_use", id="tool_use", marks=pytest.mark.nightly),
        pytest.param(LONG, "swe", id="swe", marks=pytest.mark.nightly),
    ],
    indirect=True,
)


@every_game
def test_every_sampled_token_is_trained_once_and_nothing_else(game: Game, talks: Talks) -> None:
    assert len(talks.rollouts) == game.wave * len(NUMBERS)
    for rollout in talks.rollouts:
        assert_trained_as_sampled(rollout, talks.turns[rollout.id])
    assert max(rollout.turns for rollout in talks.rollouts) >= game.turns
    for name in game.seen:
        assert any(rollout.metrics[name] for rollout in talks.rollouts), name
    assert any(generation.cached for generation in talks.generations)
    assert {(1, 2), (2, 3)} <= talks.updated, "no rollout was running during an update"


@every_game
def test_logprobs_are_the_trainers_in_every_turn(real_engine: RealEngine, pupil: Pupil, talks: Talks) -> None:
    for number in NUMBERS:
        whole = talks.whole(number)
        assert whole
        assert distance(pupil.trainers(real_engine, number), whole) < TOLERANCE
        assert distance(pupil.trainers(real_engine, number % 3 + 1), whole) > 0.05


@every_game
def test_a_turn_of_two_versions_keeps_the_keys_of_the_first(pupil: Pupil, talks: Talks) -> None:
    """Every turn, also those in whose middle the weights changed, by the models of its labels."""
    turns = [turn for turns in talks.turns.values() for turn in turns]
    assert any(len(turn.generation.spans) > 1 for turn in turns)
    assert max(off(pupil, turn) for turn in turns) < TOLERANCE


@torch.no_grad()
def off(pupil: Pupil, turn: Turn) -> float:
    """The largest distance of a turn's logprobs from those of the models that its versions name.

    A turn that waited while the weights changed goes on from the older keys of the cached part of its prompt.
    """
    prompt, said, asked = turn.prompt, turn.generation, Version.parse(turn.salt).step
    behind = len(prompt) - 1  # all of the prompt but its first token is as if it had been sampled
    spans = [(behind + span.start, behind + span.end, span.version.step) for span in said.spans]
    spans[0] = (said.cached, *spans[0][1:])
    if said.cached:
        spans.insert(0, (0, said.cached, asked))
    found = pupil.logprobs(prompt[:1], prompt[1:] + said.tokens, spans, kv="keep")[behind:]
    return float((found - torch.tensor(said.logprobs)).abs().max())
