"""Token-exact turns: what was sampled is never tokenised again."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from fake_engine import routes_of
from small_runs import chat

from stackrl.runtime.environments.base import Turn, assistant, user
from stackrl.runtime.inference.client import Generation
from stackrl.runtime.orchestrator.chat import Chat, TemplateError
from stackrl.runtime.orchestrator.conversation import Conversation, demonstrate
from stackrl.runtime.trainer.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from stackrl.runtime.transport.messages import NO_ROUTE, Span, Version

QWEN_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Rewrites earlier answers, as templates of reasoning models do."""


def with_template(template):
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = template
    return Chat(tokenizer, "some/model")


def generation(tokens, *versions):
    """An answer whose tokens were made by ``versions`` in equal parts."""
    part = math.ceil(len(tokens) / len(versions))
    spans = [Span(i * part, min(len(tokens), (i + 1) * part), version) for i, version in enumerate(versions)]
    return Generation(tokens, [-0.1 * (i + 1) for i in range(len(tokens))], spans, "stop", 0)


def text(tokens):
    return chat()._tokenizer.decode(tokens)


def test_the_prompt_is_the_rendered_template():
    assert text(chat().prompt([user("hi")])) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text([chat().stop]) == "<|im_end|>"


def test_two_turns_are_one_sequence_and_equal_the_rendered_history():
    conversation = Conversation(chat(), [user("reverse: abc")])
    conversation.add_generation(generation(chat().answer("cab"), Version(1, 0), Version(1, 1)))
    conversation.add_messages([user("no, try again")])
    second_prompt = list(conversation.prompt)
    history = [user("reverse: abc"), assistant("cab"), user("no, try again")]
    assert second_prompt == chat().prompt(history)
    conversation.add_generation(generation(chat().answer("cba"), Version(1, 1)))
    [sample] = conversation.samples("0-0", 0, "tries", 1.0)
    assert sample.tokens[: len(second_prompt)].tolist() == second_prompt
    trained = sample.tokens[sample.loss_mask == 1].tolist()
    assert trained == chat().answer("cab") + chat().answer("cba")
    covered = np.zeros(len(sample.tokens), dtype="|u1")
    for span in sample.spans:
        covered[span.start : span.end] += 1
    assert covered.tolist() == sample.loss_mask.tolist(), "spans cover the sampled tokens and no others"
    assert sample.logprobs[sample.loss_mask == 1].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4] * 2)
    assert not sample.logprobs[sample.loss_mask == 0].any()
    assert [answer.text for answer in conversation.answers] == ["cab", "cba"]
    assert conversation.prefix_breaks == 0


def told(conversation, answer):
    """An answer of an engine that tells routes of all tokens that it has computed, but of those it told."""
    tokens = chat().answer(answer)
    routes = routes_of([*conversation.prompt, *tokens[:-1]])[conversation.routed :]
    return dataclasses.replace(generation(tokens, Version(1, 0)), routes=routes)


def test_routes_of_several_turns_are_those_of_all_tokens_but_the_last():
    conversation = Conversation(chat(), [user("reverse: abc")])
    assert conversation.routed == 0
    conversation.add_generation(told(conversation, "cab"))
    assert conversation.routed == len(conversation.prompt) - 1
    conversation.add_messages([user("no, try again")])
    conversation.add_generation(told(conversation, "cba"))
    [sample] = conversation.samples("0-0", 0, "tries", 1.0)
    assert sample.routes[:-1].tolist() == routes_of(sample.tokens[:-1].tolist()).tolist()
    assert (sample.routes[-1] == NO_ROUTE).all()


def test_routes_of_an_engine_that_stops_telling_them_are_those_that_it_told():
    conversation = Conversation(chat(), [user("x")])
    conversation.add_generation(told(conversation, "a"))
    known = conversation.routed
    conversation.add_messages([user("y")])
    conversation.add_generation(generation(chat().answer("b"), Version(1, 0)))
    [sample] = conversation.samples("0-0", 0, "e", 1.0)
    assert (sample.routes[known:] == NO_ROUTE).all() and (sample.routes[:known] >= 0).all()


def test_routes_of_other_tokens_are_refused():
    conversation = Conversation(chat(), [user("x")])
    answer = told(conversation, "a")
    expected = len(answer.routes)
    broken = dataclasses.replace(answer, routes=answer.routes[1:])
    with pytest.raises(ValueError, match=f"told routes of {expected - 1} tokens, not {expected}"):
        conversation.add_generation(broken)


def test_an_answer_that_was_cut_off_is_closed_without_being_trained():
    conversation = Conversation(chat(), [user("x")])
    cut = chat().answer("abcdef")[:4]
    conversation.add_generation(generation(cut, Version(1, 0)))
    conversation.add_messages([user("y")])
    assert conversation.prompt == chat().prompt([user("x"), assistant("abcd"), user("y")])
    conversation.add_generation(generation(chat().answer("z"), Version(1, 0)))
    [sample] = conversation.samples("0-0", 0, "e", 1.0)
    assert sample.loss_mask.sum() == 4 + 2


def test_tokens_that_text_would_not_give_again_are_kept():
    """The marker of a role spelt out byte by byte: its text would be tokenised as one token."""
    spelt = [token for letter in "user" for token in chat()._tokenizer.encode(letter)]
    assert len(spelt) == 4 and len(chat()._tokenizer.encode("user")) == 1
    conversation = Conversation(chat(), [user("x")])
    conversation.add_generation(generation([*spelt, chat().stop], Version(1, 0)))
    conversation.add_messages([user("y")])
    assert conversation.prompt != chat().prompt([user("x"), assistant("user"), user("y")])
    assert conversation.answers[0].text == "user" and conversation.prefix_breaks == 0
    [sample] = conversation.samples("0-0", 0, "e", 1.0)
    assert sample.tokens[sample.loss_mask == 1].tolist() == [*spelt, chat().stop]


def test_demonstrations_are_tokenised_like_rollouts():
    messages, no = [user("reverse: abc")], user("no, try again")
    shown = demonstrate(chat(), messages, [Turn("cab", trained=False, messages=[no]), Turn("cba")])
    rolled = Conversation(chat(), messages)
    for answer in ("cab", "cba"):
        rolled.add_generation(generation(chat().answer(answer), Version(1, 0)))
        if answer == "cab":
            rolled.add_messages([no])
    [shown_sample], [rolled_sample] = (c.samples("0-0", 0, "e", 1.0) for c in (shown, rolled))
    assert shown_sample.tokens.tolist() == rolled_sample.tokens.tolist()
    assert text(shown_sample.tokens[shown_sample.loss_mask == 1]) == "cba<|im_end|>"
    assert shown_sample.spans == []


def test_a_template_that_rewrites_earlier_answers_does_not_break_the_prefix():
    conversation = Conversation(with_template(QWEN_LIKE), [user("x")])
    conversation.add_generation(generation(chat().answer("<think>hm</think>a"), Version(1, 0)))
    conversation.add_messages([user("y")])
    assert "<think>hm</think>a<|im_end|>" in text(conversation.prompt)
    assert conversation.prefix_breaks == 0


def test_a_message_that_breaks_the_prefix_starts_a_new_sample_and_is_counted():
    mark = "{% if not loop.last and messages[loop.index].role == 'system' %}!{% endif %}"
    template = CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor %}", mark + "<|im_end|>\n{% endfor %}")
    conversation = Conversation(with_template(template), [user("x")])
    conversation.add_generation(generation(chat().answer("a"), Version(1, 0)))
    conversation.add_messages([{"role": "system", "content": "again"}])
    conversation.add_generation(generation(chat().answer("b"), Version(1, 1)))
    first, second = conversation.samples("0-0", 0, "e", 1.0)
    assert conversation.prefix_breaks == 1
    assert text(first.tokens[first.loss_mask == 1]) == "a<|im_end|>"
    assert text(second.tokens[second.loss_mask == 1]) == "b<|im_end|>", "no token is trained twice"
    assert "a!<|im_end|>" in text(second.tokens)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "some/model has no chat template"),
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "does not close the model's turn with a special token"),
        (
            CHAT_TEMPLATE.replace("{% for message in messages %}", "{% for message in messages[-1:] %}"),
            "the chat template of some/model drops the model's earlier answers",
        ),
        (
            CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|>{{ messages | length }}\n"),
            "the chat template of some/model rewrites the end of a turn when a 'user' message follows",
        ),
    ],
)
def test_templates_that_cannot_be_continued_are_refused_at_start(template, reason):
    with pytest.raises(TemplateError, match=reason):
        with_template(template)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Generation([], [], [], "stop", 0), "sampled nothing"),
        (Generation([1, 2], [-1.0], [Span(0, 2, Version(1, 0))], "stop", 0), "no finite logprob"),
        (Generation([1, 2], [-1.0, -math.inf], [Span(0, 2, Version(1, 0))], "stop", 0), "no finite logprob"),
        (Generation([1, 2], [-1.0, -1.0], [Span(0, 1, Version(1, 0))], "stop", 0), "do not cover 2 tokens"),
        (Generation([1, 2], [-1.0, -1.0], [Span(1, 2, Version(1, 0))], "stop", 0), "do not cover 2 tokens"),
    ],
)
def test_answers_without_a_version_or_logprob_for_each_token_are_refused(broken, reason):
    with pytest.raises(ValueError, match=reason):
        Conversation(chat(), [user("x")]).add_generation(broken)
