"""The calculator, the search, and rollouts that use them or try to."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.base import Answer, Call
from stackrl.runtime.environments.calculator import LONGEST, CalculatorError, calculate
from stackrl.runtime.environments.tool_use import found
from stackrl.schemas.environments import Environment


def environment(**args):
    return make(Environment(name="it", type="tool_use", args=args))


def call(name, **arguments):
    return Answer("", (Call(name, arguments),))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("-4 - -6", "2"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        (" 2 ", "2"),
    ],
)
def test_what_a_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1/0", "division by zero"),
        ("2**99", "only numbers"),
        ("9" * 40, "too large"),
        ("*".join(["99999999"] * 9), "too large"),
        ("1e999", "too large"),
        ("1 +", "cannot be read"),
        ("", "cannot be read"),
        ("(" * 150, "cannot be read"),
        ("a", "only numbers"),
        ("True", "only numbers"),
        ("1j", "only numbers"),
        ("__import__('os').getcwd()", "only numbers"),
        ("[1]*9", "only numbers"),
        ("1" * (LONGEST + 1), "longer than"),
    ],
)
def test_what_a_calculator_refuses(expression, why):
    with pytest.raises(CalculatorError, match=why):
        calculate(expression)


@given(some.text(max_size=60) | some.text("0123456789+-*/(). ej_", max_size=60))
def test_nothing_that_a_model_may_write_breaks_the_calculator(expression):
    try:
        assert calculate(expression)
    except CalculatorError as error:
        assert str(error)


def test_a_search_finds_the_document_with_most_words():
    documents = ["The lamp costs 3 coins.", "The bell costs 4 coins."]
    assert found("bell", documents) == documents[1]
    assert found("what does the Lamp cost?", documents) == documents[0]
    assert found("the", documents) == found("zebra", documents) == found("", documents) == ""


async def test_a_question_is_answered_by_calls_and_then_in_words():
    it = environment(goods=2)
    task = it.task(Random(4))
    first, second = task.data["needed"]
    looked_up = await it.reply(task, [call("search", words=first)])
    assert not looked_up.done and looked_up.rewards["calls"] == pytest.approx(1 / 3)
    [told] = looked_up.messages
    assert told["role"] == "tool" and told["content"].startswith(f"The {first} costs ")
    both = Answer("", (Call("search", {"words": second}), Call("calculator", {"expression": "1+1"})))
    assert [m["content"] for m in (await it.reply(task, [both])).messages][1] == "2"
    sum_ = call("calculator", expression=task.data["expression"])
    answer = Answer(f"They cost {task.data['answer']} coins.")
    end = await it.reply(task, [call("search", words=first), both, sum_, answer])
    assert end.done and not end.messages
    assert end.rewards == {"right": 1.0, "digits": 1.0, "calls": 1.0}
    assert end.metrics == {"solved": 1.0, "calls": 4.0, "bad_calls": 0.0}


async def test_a_guess_without_a_call_is_right_but_worth_less():
    it = environment()
    task = it.task(Random(4))
    end = await it.reply(task, [Answer(str(task.data["answer"]))])
    assert end.done and end.rewards == {"right": 1.0, "digits": 1.0, "calls": 0.0}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (Call("", problem="the call is not JSON"), "error: the call is not JSON"),
        (Call("browser", {}), "error: there is no tool 'browser'; there is calculator and search"),
        (Call("calculator", {}), "error: calculator needs expression, a text"),
        (Call("calculator", {"expression": 3}), "error: calculator needs expression, a text"),
        (Call("calculator", {"expression": "1/0"}), "error: division by zero"),
        (Call("search", {"words": "zebra"}), "error: no document has these words"),
    ],
)
async def test_a_bad_call_is_told_so_and_the_rollout_goes_on(bad, told):
    it = environment()
    task = it.task(Random(0))
    outcome = await it.reply(task, [Answer("", (bad,))])
    assert not outcome.done and outcome.messages == ({"role": "tool", "content": told},)
    assert outcome.metrics["bad_calls"] == 1.0


async def test_calls_end_with_the_turns():
    it = environment(turns=4)
    task = it.task(Random(0))
    answer = str(task.data["answer"])  # in the text of a call it is no answer
    calls = [Answer(f"call with {answer}", (Call("calculator", {"expression": answer}),))] * 4
    assert not (await it.reply(task, calls[:3])).done
    end = await it.reply(task, calls)
    assert end.done and end.rewards["right"] == 0.0 and not end.messages


async def test_with_the_calculator_alone_an_expression_is_asked_for():
    it = environment(tools=["calculator"], goods=3, largest=500)
    assert [tool.name for tool in it.tools] == ["calculator"]
    task = it.task(Random(0))
    expression = task.messages[0]["content"].removesuffix("=?")
    assert calculate(expression) == str(task.data["answer"])
    told = await it.reply(task, [call("search", words="lamp")])
    assert told.messages[0]["content"] == "error: there is no tool 'search'; there is calculator"


def test_too_few_turns_are_refused():
    with pytest.raises(EnvironmentRefused, match="turns: 3 are too few for 3 calls and an answer; make it 4"):
        environment(goods=2, turns=3)
