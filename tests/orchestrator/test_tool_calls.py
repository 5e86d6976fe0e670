"""Calls of tools are read as each family writes them, and a wrong one is told and never raised."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_runs import chat as byte_chat
from template_families import FAMILIES, FUNCTIONS, TOOLS, answer_of, called, family_named, written

from stackrl.runtime.environments.base import Call, user
from stackrl.runtime.orchestrator.renderers import RENDERERS

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30).map(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS}, optional={"tags": st.lists(TEXTS, max_size=3), "loud": st.booleans()}
)


@every_family
@settings(max_examples=12, deadline=None)
@given(arguments=ARGUMENTS)
@example(arguments={"text": "12", "tags": ["null"], "loud": False})
@example(arguments={"text": 'two\nlines "quoted" & naïve > \\n', "tags": []})
def test_calls_are_read_as_the_template_writes_them(family, arguments):
    chat = family.chat
    answer = {"role": "assistant", "content": "", "tool_calls": [called("note", **arguments)]}
    whole = chat.render([user("go"), answer], tools=FUNCTIONS)
    text = whole[len(chat.render([user("go")], tools=FUNCTIONS)) :]
    text = ("</think>" if family.thinks else "") + text[
        text.index("{") if family.name == "llama_like" else 0 :
    ]
    text = text.rpartition(chat.stop_text)[0] if chat.stop_text in text else text
    assert chat.calls(text, TOOLS) == (Call("note", arguments),)
    assert chat.calls(text, ()) == (), "an environment without tools has no calls"


HERMES, CODER, PAIRS, XML, JSON = "chatml", "qwen3_coder", "glm", "minimax_m2", "llama3"


@pytest.mark.parametrize(
    ("renderer", "text", "name", "problem"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", "it does not end with </tool_call>"),
        (HERMES, "<tool_call>add(1, 2)</tool_call>", "", "it is no JSON: Expecting value at character 1"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "", "NaN is no number"),
        (HERMES, '<tool_call>["add"]</tool_call>', "", 'a call is a JSON object with "name" and "arguments"'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "add", "is no JSON object"),
        (HERMES, f"<tool_call>{'[' * 100_000}</tool_call>", "", "nested too deeply"),
        (HERMES, '<tool_call>{"name": "sub"}</tool_call>', "sub", "no function 'sub'; there is add, note"),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "add", "'a' is a required property"),
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": "1", "b": 2}}</tool_call>',
            "add",
            "argument 'a': '1' is not of type 'number'",
        ),
        (CODER, "<tool_call>\n<function=add>\n</tool_call>", "", "it holds <function=its name>"),
        (CODER, "<tool_call><function=add>a=1</function></tool_call>", "add", "each argument is <parameter="),
        (PAIRS, "<tool_call>add 1 2</tool_call>", "", "it begins with the function's name"),
        (PAIRS, "<tool_call></tool_call>", "", "it begins with the function's name"),
        (PAIRS, "<tool_call>add\n<arg_key>a</arg_key>1</tool_call>", "add", "each argument is <arg_key>"),
        (
            PAIRS,
            "<tool_call>add<arg_key>a</arg_key><arg_value>one</arg_value>"
            "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
            "add",
            "argument 'a': 'one' is not of type 'number'",
        ),
        (XML, "<minimax:tool_call></minimax:tool_call>", "", 'it holds <invoke name="a function">'),
        (XML, '<minimax:tool_call><invoke name="add">', "", "it does not end with </minimax:tool_call>"),
        (
            XML,
            '<minimax:tool_call><invoke name="add">1</invoke></minimax:tool_call>',
            "add",
            "each argument is <parameter",
        ),
        (JSON, '{"name": "add", "parameters": {"a": 1', "", "it is no JSON"),
        (JSON, '<|python_tag|>add.call(a="1")', "", "it is no JSON"),
    ],
)
def test_a_malformed_call_is_a_call_with_a_problem(renderer, text, name, problem):
    family = next(family for family in FAMILIES if family.renderer == renderer)
    said = f"</think>{text}" if family.thinks else text
    [call] = family.chat.calls(said, TOOLS)
    assert call.name == name and problem in call.problem and len(call.problem) < 300


def test_a_wrong_call_does_not_hide_a_right_one():
    right = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    calls = byte_chat().calls(f"<tool_call>?</tool_call> and {right}{right}", TOOLS)
    assert [bool(call.problem) for call in calls] == [True, False, False]
    assert calls[1] == Call("add", {"a": 1, "b": 2})


def test_an_answer_of_llama_that_is_no_call_is_none():
    chat = next(family.chat for family in FAMILIES if family.renderer == "llama3")
    assert chat.calls("It is 3.", TOOLS) == chat.calls('{"result": 3}', TOOLS) == ()
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    assert (
        chat.calls(f"<|python_tag|>{call}", TOOLS)
        == chat.calls(call, TOOLS)
        == (Call("add", {"a": 1, "b": 2}),)
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm_4_6", "glm_4_7", "minimax_m2"])
def test_what_is_only_thought_is_no_call(name):
    chat = next(family.chat for family in FAMILIES if family.name == name)
    call = written(chat, [user("go")], {**answer_of(family_named(name), 0), "reasoning_content": "T"})
    call = call.partition("</think>")[2]
    opening = "" if chat._thought else "\n<think>\n"
    assert len(chat.calls(f"{opening}T</think>{call}", TOOLS)) == 1
    assert chat.calls(f"{opening}perhaps {call}", TOOLS) == ()
    assert chat.calls(f"{opening}perhaps {call}</think> No.", TOOLS) == ()


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<function=add>", "</function>", "<parameter=a>", "</parameter>", '<parameter name="a">'),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="add">', "</invoke>", "<|python_tag|>"),
    *('{"name":', '"add"', '"arguments"', '"parameters"', "{", "}", '"', ",", ":", "1", "add", "é", "\n"),
)


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_whatever_a_model_writes_is_read_without_an_exception(text):
    for renderer in RENDERERS:
        for call in renderer.calls(text, TOOLS):
            assert isinstance(call, Call) and isinstance(call.arguments, dict)


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "<arg_key>", "<arg_key>a</arg_key>", "<parameter=", "<function=a>", "<invoke name="],
)
def test_long_answers_are_read_in_a_moment(piece):
    """The reading runs beside thousands of other rollouts and must not grow with the square of the length."""
    text = "<minimax:tool_call><tool_call>add" + piece * (200_000 // len(piece))
    text += "</tool_call></minimax:tool_call>"
    start = time.process_time()
    for renderer in RENDERERS:
        list(renderer.calls(text, TOOLS))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("renderer", RENDERERS, ids=lambda renderer: renderer.name)
def test_examples_of_calls_are_calls(renderer):
    [call] = renderer.calls(renderer.example, [])
    assert call == Call("function", {"argument": "value"})
