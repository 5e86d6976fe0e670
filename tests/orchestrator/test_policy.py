"""The model as environments ask it: which tokens its answers go on from, and what is trained of them."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from fake_engine import FakeEngine
from small_runs import chat

from stackrl.runtime.environments import make
from stackrl.runtime.environments.base import NoRoom, user
from stackrl.runtime.orchestrator.policy import Policy
from stackrl.runtime.orchestrator.rollout import Assignment, Limits
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.schemas.environments import Environment

GREETING, MORE, OTHER = user("hello"), user("more"), user("something else")
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


class Asked:
    """A policy over a fake engine that answers with a, b, c …, and its prompts as text."""

    def __init__(self, sequence=2048):
        letters = itertools.cycle("abcdefgh")
        self.engine = FakeEngine(lambda prompt, rng: chat().answer(next(letters)))
        environment = make(Environment(name="it", type="reverse_text"))
        what = Assignment(4, 2, "it", environment, environment.task(Random(0)), Seeds(0).branch("sample", 2))
        self.policy = Policy(what, chat(), self._generate, Limits(9, sequence, 5.0, 1.0))

    async def _generate(self, tokens, *, stop, request, **more):
        return await self.engine.generate(tokens, stop_token_ids=stop, request_id=request, salt="0.0", **more)

    @property
    def prompts(self):
        return [request["tokens"] for request in self.engine.requests]

    async def complete(self, *history, tools=()):
        number = await self.policy.complete(history, tools)
        return number, self.policy.said(number).text


async def test_a_history_that_goes_on_from_the_last_answer_extends_its_tokens():
    asked = Asked()
    assert await asked.complete(GREETING) == (0, "a")
    assert await asked.complete(GREETING, {"answer": 0}, MORE) == (1, "b")
    first, second = asked.prompts
    assert second[: len(first) + 2] == first + chat().answer("a")
    [sample] = asked.policy.samples()
    assert asked.policy.prefix_breaks == 0 and sample.loss_mask.sum() == asked.policy.sampled == 4


@pytest.mark.parametrize(
    ("history", "tools"),
    [
        ([OTHER], ()),  # another agent's
        ([GREETING, {"answer": 0}, MORE], [TOOL]),  # other tools
        ([GREETING, {"answer": 0}, OTHER], ()),  # from an answer that others followed
        ([GREETING, {"role": "assistant", "content": "a, they say"}, MORE], ()),  # a changed answer
    ],
)
async def test_any_other_history_begins_a_sequence(history, tools):
    asked = Asked()
    await asked.complete(GREETING)
    await asked.complete(GREETING, {"answer": 0}, MORE)
    assert await asked.complete(*history, tools=tools) == (2, "c")
    samples = asked.policy.samples()
    assert asked.policy.prefix_breaks == 1 and len(samples) == 2
    assert [int(sample.loss_mask.sum()) for sample in samples] == [4, 2], "each answer is trained once"
    shown = chat().text(asked.prompts[-1])
    assert ("assistant\na" in shown) == (len(history) > 1) and ("add" in shown) == bool(tools)


async def test_what_was_given_up_is_not_trained():
    asked = Asked()
    await asked.complete(GREETING)
    await asked.complete(OTHER)
    await asked.complete(OTHER, {"answer": 1}, MORE)
    asked.policy.keep({0})
    [sample] = asked.policy.samples()
    assert sample.tokens[: len(asked.prompts[0])].tolist() == asked.prompts[0]
    asked.policy.keep({1})
    with pytest.raises(ValueError, match="judged no whole conversation"):
        asked.policy.samples()


async def test_without_room_there_is_no_answer_and_no_other_one_later():
    asked = Asked()
    await asked.complete(GREETING)
    full = Asked(sequence=len(asked.prompts[0]) + 6)
    await full.complete(GREETING)
    for message in (user("a long message that does not fit"), user("no")):
        with pytest.raises(NoRoom):
            await full.complete(GREETING, {"answer": 0}, message)
    assert len(full.engine.requests) == 1 and len(full.policy.samples()) == 1


async def test_what_cannot_be_answered_is_the_environments_mistake():
    asked = Asked()
    await asked.policy.answer()
    with pytest.raises(ValueError, match="without a message"):
        await asked.policy.answer()
    with pytest.raises(KeyError, match="there is no answer 7"):
        asked.policy.said(7)
