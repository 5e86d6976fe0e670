"""Whole rollouts of the built-in environments: the tokens of all turns, and stacks within their limits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random

import numpy as np
import pytest
from fake_engine import FakeEngine
from small_runs import chat

import stacks
from stackrl.runtime.environments import RUNNABLE, make
from stackrl.runtime.environments.base import TurnEnvironment
from stackrl.runtime.orchestrator.conversation import demonstrate
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, roll_out
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.schemas.environments import Environment
from stackrl.schemas.inference import PullWeights
from stackrl.schemas.loader import load

LIMITS = Limits(turn=200, sequence=4096, seconds=60.0, temperature=1.0)
MULTI_TURN = ("guess_number", "wordle", "tool_use")


@asynccontextmanager
async def serving(engine):
    together = Engines([engine], 8, PullWeights())
    task = asyncio.create_task(together.serve(lambda name, **fields: None, 5))
    async with together.serving(0) as generate:
        yield generate
    task.cancel()


async def rolled(type, answers, seed=0, **args):
    """A rollout in which the engine gives ``answers(environment, task)``, one a turn."""
    it = make(Environment(name="it", type=type, args=args))
    task = it.task(Random(seed))
    turns = iter(answers(it, task))
    engine = FakeEngine(lambda prompt, rng: chat().answer(next(turns)))
    async with serving(engine) as generate:
        what = Assignment(0, 0, "it", it, task, Seeds(0).branch("sample", 0))
        return await roll_out(what, chat(), generate, LIMITS), engine


def shown(it, task):
    return [turn.answer for turn in it.demonstration(task, Random(0), 0.0)]


@pytest.mark.parametrize("type", MULTI_TURN)
async def test_many_turns_are_one_sequence_of_what_was_sampled(type):
    for seed in range(5):
        rollout, engine = await rolled(type, shown, seed)
        assert rollout.metrics["solved"] == 1.0 and rollout.prefix_breaks == 0
        [sample] = rollout.samples
        prompts = [request["tokens"] for request in engine.requests]
        assert len(prompts) == rollout.turns >= 1
        trained = np.zeros(len(sample.tokens), bool)
        for prompt, later in zip(prompts, [*prompts[1:], sample.tokens.tolist()], strict=True):
            assert later[: len(prompt)] == prompt
            end = later.index(chat().stop, len(prompt)) + 1
            trained[len(prompt) : end] = True
        assert (sample.loss_mask != 0).tolist() == trained.tolist()


async def test_a_tool_is_called_by_text_and_its_result_is_the_next_message():
    rollout, engine = await rolled("tool_use", shown)
    assert rollout.rewards == {"right": 1.0, "digits": 1.0, "calls": 1.0} and rollout.turns == 4
    first, *_, last = (chat().text(request["tokens"]) for request in engine.requests)
    assert "calculator" in first and "search" in first and "coins" not in first
    assert last.count(" costs ") == 2, "both documents were read"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("<tool_call>\n{not json\n</tool_call>", "error: "),
        ('<tool_call>\n{"name": "browser", "arguments": {}}\n</tool_call>', "error: "),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*21"}}\n</tool_call>', "42"),
    ],
)
async def test_a_call_that_is_wrong_is_told_so_and_the_rollout_goes_on(call, told):
    rollout, engine = await rolled("tool_use", lambda it, task: [call, str(task.data["answer"])])
    assert rollout.turns == 2 and rollout.rewards["right"] == 1.0 and rollout.prefix_breaks == 0
    assert rollout.metrics["bad_calls"] == float(told == "error: ")
    before, after = (chat().text(request["tokens"]) for request in engine.requests)
    assert call in after and told in after.removeprefix(before).partition(call)[2]


STACKS = [
    file
    for file in stacks.STACKS
    if file.stem.endswith("-cpu")
    and "type: supervised" in file.read_text()
    and "type: rl" in file.read_text()
]


@pytest.mark.parametrize("file", STACKS, ids=lambda file: file.stem)
def test_demonstrations_fit_into_what_a_stack_allows(file, monkeypatch):
    """An answer that may not be as long as the right one could never be learnt."""
    monkeypatch.chdir(stacks.ROOT)
    stack = load(file.relative_to(stacks.ROOT)).stack
    for written in stack.environments:
        if not issubclass(RUNNABLE[written.type], TurnEnvironment) and written.type != "python":
            continue
        it = make(written)
        for seed in range(40):
            task = it.task(Random(seed))
            turns = it.demonstration(task, Random(seed), 0.0)
            tokens = [len(chat().answer(turn.answer)) for turn in turns]
            assert max(tokens) <= stack.sampling.max_tokens, turns
            conversation = demonstrate(chat(), task.messages, turns, it.tools)
            assert len(conversation.prompt) <= stack.inference.max_model_length
