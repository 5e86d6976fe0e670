"""Turns under the templates of several families: what was sampled stays, what is added is the template's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import chat as byte_chat
from template_families import (
    CHATML,
    FAMILIES,
    FUNCTIONS,
    GLM,
    LLAMA,
    TOOLS,
    Family,
    answer_of,
    family_named,
    written,
)

from stackrl.runtime.environments.base import Call, Turn, assistant, tool, user
from stackrl.runtime.inference.client import Generation
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.conversation import Conversation, demonstrate
from stackrl.runtime.orchestrator.renderers import RENDERERS, renderer_of
from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer
from stackrl.runtime.transport.messages import Span, Version
from stackrl.schemas.model import Speaking

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def sampled(tokens):
    return Generation(list(tokens), [-1.0] * len(tokens), [Span(0, len(tokens), Version(1, 0))], "stop", 0)


def decoded(chat: Chat, tokens):
    return chat._tokenizer.decode(tokens)


def encoded(chat: Chat, text):
    return chat._tokenizer.encode(text, add_special_tokens=False)


@every_family
def test_turns_with_tools_are_what_the_models_own_template_makes_of_them(family):
    """Over many turns the tokens read as the template's text, and only they that were sampled are learnt."""
    chat, history = family.chat, [user("Add up.")]
    conversation = Conversation(chat, history, TOOLS)
    assert decoded(chat, conversation.prompt) == chat.render(history, generate=True, tools=FUNCTIONS)
    answers = []
    for number in range(5):
        answer = answer_of(family, number)
        results = [tool(f"result {number}{letter}") for letter in "ab"[: len(answer["tool_calls"])]]
        text = written(chat, history, answer)
        end = chat.delta(results)[0]
        answers.append([*encoded(chat, text), end])
        conversation.add_generation(sampled(answers[-1]))
        assert conversation.answers[-1].calls == tuple(
            Call(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]
        )
        conversation.add_messages(results)
        history = [*history, answer, *results]
        expected = chat.render(history, generate=True, tools=FUNCTIONS)
        assert decoded(chat, conversation.prompt) == expected
    [sample] = conversation.samples("0-0", 0, "e", 1.0)
    assert sample.tokens[sample.loss_mask == 1].tolist() == list(chain.from_iterable(answers))
    assert conversation.prefix_breaks == 0


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.thinks], ids=lambda family: family.name
)
def test_turns_without_tools_are_what_the_models_own_template_makes_of_them(family):
    chat, history = family.chat, [{"role": "system", "content": "Be brief."}, user("one")]
    conversation = Conversation(chat, history)
    for number in range(3):
        conversation.add_generation(sampled(chat.answer(f"answer {number}")))
        replies = [user(f"reply {number}")]
        conversation.add_messages(replies)
        history = [*history, assistant(f"answer {number}"), *replies]
        assert decoded(chat, conversation.prompt) == chat.render(history, generate=True)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.thinks], ids=lambda family: family.name
)
def test_thoughts_stay_where_the_template_would_drop_them(family):
    chat, history = family.chat, [user("one")]
    answer = {"role": "assistant", "content": "Two.", "reasoning_content": "Hm, long."}
    text = written(chat, history, answer)
    conversation = Conversation(chat, history)
    conversation.add_generation(sampled([*encoded(chat, text), chat.stop]))
    conversation.add_messages([user("three")])
    rendered = chat.render([*history, answer, user("three")], generate=True)
    assert "Hm, long." not in rendered and "Hm, long." in decoded(chat, conversation.prompt)
    assert conversation.prefix_breaks == 0
    tail = rendered[rendered.rindex("three") - 1 :]
    assert decoded(chat, conversation.prompt).endswith(tail)


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "tool"]), st.text(min_size=1, max_size=12)), min_size=1, max_size=3
).map(lambda drawn: [{"role": role, "content": text} for role, text in sorted(drawn)])
"""What an environment says between two answers: results of tools first, then a user."""


@every_family
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_sampled_tokens_are_kept_whatever_they_are(family, data):
    chat = family.chat
    ordinary = [token for token in range(len(chat._tokenizer)) if token not in chat.stops]
    conversation, prompts, answers = Conversation(chat, [user("go")], TOOLS), [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.lists(st.sampled_from(ordinary), min_size=1, max_size=8))
        end = data.draw(st.sampled_from([None, *chat.stops]))
        answers.append(tokens if end is None else [*tokens, end])
        prompts.append([*conversation.prompt, *answers[-1]])
        conversation.add_generation(sampled(answers[-1]))
        assert conversation.answers[-1].closed == (end is not None)
        conversation.add_messages(data.draw(MESSAGES))
    for prompt in prompts:
        assert conversation.prompt[: len(prompt)] == prompt, "a later turn extends an earlier one"
    [sample] = conversation.samples("0-0", 0, "e", 1.0)
    assert sample.tokens[sample.loss_mask == 1].tolist() == list(chain.from_iterable(answers))
    assert conversation.prefix_breaks == 0


@every_family
def test_a_turn_that_ends_is_not_ended_twice(family):
    chat = family.chat
    for messages in ([user("m")], [tool("m")]):
        first, *rest = chat.delta(messages)
        assert first in chat.stops
        assert chat.delta(messages, end=first) == rest
        assert chat.delta(messages, end=None) == [first, *rest], "an answer that was cut off is closed"
    others = [stop for stop in chat.stops if stop != chat.delta([user("m")])[0]]
    for other in others:  # GLM's open a turn that the template does not open; Llama's close it as well
        whole = family.renderer == "glm"
        assert chat.delta([user("m")], end=other) == chat.delta([user("m")])[not whole :]


@every_family
def test_a_template_is_recognised(family):
    assert family.chat._renderer.name == family.renderer


def test_a_renderer_can_be_named():
    tokenizer = byte_tokenizer(256)
    assert Chat(tokenizer, "some/model")._renderer.name == "chatml"
    assert Chat(tokenizer, "some/model", Speaking(renderer="qwen3_coder"))._renderer.name == "qwen3_coder"
    assert renderer_of("{{ anything }}").name == "any"


def test_a_template_that_does_not_tell_of_tools_is_helped():
    chat = byte_chat()
    told = decoded(chat, chat.prompt([user("hi")], TOOLS))
    assert told.startswith("<|im_start|>system\n") and told.endswith(
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(json.dumps(function["function"]) in told for function in FUNCTIONS)
    system = {"role": "system", "content": "Be brief."}
    with_system = decoded(chat, chat.prompt([system, user("hi")], TOOLS))
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n") and with_system.count("system\n") == 1
    example = chat._renderer.example
    assert example in told
    [call] = chat.calls(example, TOOLS)
    assert "there is no function 'function'" in call.problem, "the example itself is well-formed"


def test_a_demonstration_ends_as_the_next_turn_begins():
    chat = family_named("glm_4_7").chat
    turns = [Turn("one", messages=[tool("r")]), Turn("two", messages=[user("more")]), Turn("three")]
    [sample] = demonstrate(chat, [user("go")], turns, TOOLS).samples("d", 0, "e", 1.0)
    learnt = decoded(chat, sample.tokens[sample.loss_mask == 1])
    assert learnt == "</think>one<|observation|></think>two<|user|></think>three<|user|>"
    history = [user("go"), assistant("one"), tool("r"), assistant("two"), user("more"), assistant("three")]
    rendered = chat.render(history, tools=FUNCTIONS)
    assert decoded(chat, sample.tokens).replace("<think></think>", "</think>") == rendered + "<|user|>"


def test_a_thought_that_the_prompt_closes_is_none():
    template = (
        family_named("qwen2_5").template + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    )
    chat = Family("closed", "chatml", CHATML, text=template).chat
    assert decoded(chat, chat.prompt([user("go")])).endswith("</think>\n\n")
    assert len(chat.calls(chat._renderer.example, TOOLS)) == 1
    assert decoded(chat, chat.answer("four")) == "four<|im_end|>"


def test_a_demonstration_closes_the_thought_that_the_template_opens():
    for name, closing in [
        ("minimax_m2", "\n</think>\n\n"),
        ("qwen3_5", "\n</think>\n\n"),
        ("glm_4_7", "</think>"),
    ]:
        chat = family_named(name).chat
        assert decoded(chat, chat.answer("four")) == f"{closing}four{chat.stop_text}"
        assert decoded(chat, chat.answer("2+2</think>four")).startswith("2+2</think>four")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("minimax_m2", "is it 3? or", ""),
        ("minimax_m2", "is it 3?\n</think>\n\n4", "4"),
        ("qwen3", "is it 3?", "is it 3?"),
        ("qwen3", "<think>\nis it 3? or", ""),
        ("qwen3", "<think>\nis it 3?\n</think>\n\n4", "4"),
    ],
)
def test_environments_are_told_what_stands_behind_the_thoughts(name, text, said):
    """A template that opens them leaves no mark of that in an answer that was cut off."""
    chat = family_named(name).chat
    conversation = Conversation(chat, [user("go")])
    tokens = chat.encode_after(text, closed=True)
    span = Span(0, len(tokens), Version(1, 0))
    conversation.add_generation(Generation(tokens, [-0.1] * len(tokens), [span], "length", 0))
    [answer] = conversation.answers
    assert (answer.text, answer.said) == (text, said)


FORGETTING = [family for family in FAMILIES if family.thinks]


@pytest.mark.parametrize("family", FORGETTING, ids=lambda family: family.name)
def test_a_template_that_drops_thoughts_begins_a_new_sample_where_that_is_wanted(family):
    """Results of tools leave thoughts where they are; a user's message drops them."""
    tokenizer = family.chat._tokenizer
    chat, history = Chat(tokenizer, family.name, Speaking(thoughts="template")), [user("Add up.")]
    conversation = Conversation(chat, history, TOOLS)
    for number, replies in enumerate([[tool("3.5")], [user("And now?")], [tool("4.5")]]):
        answer = {**answer_of(family, 0), "content": f"Call {number}."}
        text = written(chat, history, answer)
        conversation.add_generation(sampled([*encoded(chat, text), chat.delta(replies)[0]]))
        conversation.add_messages(replies)
        history = [*history, answer, *replies]
        expected = chat.render(history, generate=True, tools=FUNCTIONS)
        assert decoded(chat, conversation.prompt) == expected
    assert conversation.prefix_breaks == 1
    first, second = conversation.samples("0-0", 0, "e", 1.0)
    texts = [decoded(chat, sample.tokens[sample.loss_mask == 1]) for sample in (first, second)]
    assert ["Call 0." in text for text in texts] == [True, False], "no token is trained twice"
    assert ["Call 2." in text for text in texts] == [False, True]


def test_without_thoughts_there_is_nothing_to_drop():
    chat = Chat(family_named("qwen3").chat._tokenizer, "qwen3", Speaking(thoughts="template"))
    conversation = Conversation(chat, [user("one")])
    for _ in range(2):
        conversation.add_generation(sampled(chat.answer("two")))
        conversation.add_messages([user("three")])
    assert conversation.prefix_breaks == 0


def test_the_stack_can_name_each_renderer():
    named = Speaking.model_fields["renderer"].annotation.__args__
    assert set(named) == {"auto", *(renderer.name for renderer in RENDERERS)} - {"any"}


ELSEWHERE = {
    "llama3_1": Family("llama3_1", "llama3", LLAMA, several=False),
    "llama3_2": Family("llama3_2", "llama3", LLAMA, several=False),
    "qwen3_instruct_2507": Family("qwen3_instruct_2507", "chatml", CHATML),
    "qwen3_8": Family("qwen3_8", "qwen3_coder", CHATML, thinks=True),
    "glm4moe": Family("glm4moe", "glm", GLM, thinks=True),
}


@pytest.mark.nightly
def test_templates_that_are_not_kept_here(tmp_path):
    """Those that a release of trl ships, Llama's among them."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", tmp_path, "trl==1.16.0"]
    if subprocess.run(command, timeout=300, check=False).returncode:
        pytest.skip("no package index is in reach")
    [wheel] = tmp_path.glob("*.whl")
    for name, family in ELSEWHERE.items():
        template = zipfile.ZipFile(wheel).read(f"trl/chat_templates/{name}.jinja").decode()
        whole = dataclasses.replace(family, text=template)
        test_a_template_is_recognised(whole)
        test_turns_with_tools_are_what_the_models_own_template_makes_of_them(whole)
        if not family.thinks:
            test_turns_without_tools_are_what_the_models_own_template_makes_of_them(whole)
