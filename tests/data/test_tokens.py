"""Learnt tokens are exactly those that the chosen roles wrote, with what closes their turns."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import chat
from template_families import FAMILIES, FUNCTIONS, called
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stackrl.runtime.data.files import DataError, Row
from stackrl.runtime.data.rows import document
from stackrl.runtime.data.tokens import Tokenizing
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.trainer.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from stackrl.schemas.data import Data

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The byte tokenizer's template with the marks from which transformers makes its own mask."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n"
    "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of earlier turns, as templates of reasoning models do."""
TALK = [
    ("system", "Be brief: assistant"),
    ("user", "user"),
    ("assistant", "\nassistant "),
    ("user", "naïve 👍?"),
    ("assistant", "né"),
    ("tool", "4"),
    ("assistant", ""),
    ("user", "bye"),
]


def messages(*talk):
    return [{"role": role, "content": content} for role, content in talk]


def with_template(template):
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = template
    return Chat(tokenizer, "some/model")


def sequences(values, *, of=None, longest=512, **settings):
    data = Data.model_validate({"path": "rows.jsonl"} | settings)
    return Tokenizing(of or chat(), data, longest).sequences(document(Row("rows.jsonl:1", values)))


def learnt(tokens, of=None):
    """The text of each stretch of learnt tokens."""
    edges = np.flatnonzero(np.diff([0, *tokens.mask, 0])).reshape(-1, 2)
    return [(of or chat())._tokenizer.decode(tokens.ids[start:end]) for start, end in edges]


def test_the_mask_is_the_one_that_transformers_makes():
    """Its template is marked by hand; ours finds the same tokens without marks."""
    tokenizer = byte_tokenizer(256)
    reference = tokenizer.apply_chat_template(
        messages(*TALK), chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    [tokens] = sequences({"messages": messages(*TALK)})
    assert tokens.ids == reference["input_ids"][: len(tokens.ids)]
    assert tokens.mask == reference["assistant_masks"][: len(tokens.ids)]
    assert not any(reference["assistant_masks"][len(tokens.ids) :]), "what is left off is not learnt"
    assert tokens.mask[-1] == 1


def test_each_answer_is_learnt_with_its_end_and_without_its_header():
    [tokens] = sequences({"messages": messages(*TALK)})
    assert learnt(tokens) == ["\nassistant <|im_end|>", "né<|im_end|>", "<|im_end|>"]


def test_other_roles_are_learnt_where_they_are_named():
    [tokens] = sequences({"messages": messages(*TALK)}, learn=["user", "tool"])
    assert learnt(tokens) == ["user<|im_end|>", "naïve 👍?<|im_end|>", "4<|im_end|>", "bye<|im_end|>"]
    [tokens] = sequences({"messages": messages(*TALK)}, learn=["system", "assistant"])
    assert learnt(tokens)[0] == "Be brief: assistant<|im_end|>" and len(learnt(tokens)) == 4


def test_of_a_prompt_nothing_is_learnt():
    values = {"prompt": messages(*TALK[:3], TALK[3]), "completion": messages(TALK[4])}
    [tokens] = sequences(values)
    assert learnt(tokens) == ["né<|im_end|>"]
    assert tokens.ids == sequences({"messages": messages(*TALK[:5])})[0].ids
    [tokens] = sequences({"prompt": "7+5?", "completion": "12"})
    assert tokens.ids == chat().prompt(messages(("user", "7+5?"))) + chat().answer("12")


def test_no_token_reaches_over_the_edge_of_an_answer():
    """The pieces are tokenised one by one: a prompt's tokens are those that an engine would be given."""
    [tokens] = sequences({"messages": messages(*TALK[:5])})
    start = tokens.mask.index(1)
    assert tokens.ids[:start] == chat().prompt(messages(*TALK[:2]))
    assert tokens.ids[: -len(chat().answer("né"))] == chat().prompt(messages(*TALK[:4]))


def test_a_tokenizer_that_sets_a_blank_before_the_first_word_does_so_once():
    """As those of SentencePiece do: every further piece is tokenised as inside of the text."""
    letters = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate("▁\nabcdefghijklmnopqrstuvwxyz")}, merges=[])
    )
    letters.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    letters.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    tokenizer.chat_template = "chat " + CHAT_TEMPLATE
    talk = messages(("user", "hello"), ("assistant", "good day"), ("user", "bye"), ("assistant", "bye bye"))
    [tokens] = sequences({"messages": talk}, of=Chat(tokenizer, "some/model"))
    reference = tokenizer.apply_chat_template(talk, chat_template="chat " + MARKED, return_dict=True)[
        "input_ids"
    ]
    assert tokens.ids == reference[: len(tokens.ids)]
    assert [tokenizer.convert_ids_to_tokens(i) for i in tokens.ids[:2]] == ["▁", "c"]


def test_tools_and_calls_go_through_the_template():
    template = "{% if tools %}tools: {{ tools[0]['name'] }}\n{% endif %}" + CHAT_TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message['content'] }}{{ message.get('tool_calls', '') }}"
    )
    of = with_template(template)
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    values = {"messages": [*messages(("user", "1+1?")), call], "tools": [{"name": "add"}]}
    [tokens] = sequences(values, of=of)
    assert of._tokenizer.decode(tokens.ids).startswith("tools: add\n<|im_start|>user\n1+1?")
    assert learnt(tokens, of) == ["[{'name': 'add'}]<|im_end|>"]


def test_where_no_token_closes_a_turn_the_one_that_opens_the_next_is_learnt():
    """GLM's models end a turn with the token of whoever speaks next."""
    of = next(family.chat for family in FAMILIES if family.name == "glm_4_6")
    call = {"role": "assistant", "content": "", "tool_calls": [called("add", a=1, b=2)]}
    talk = [*messages(("user", "1+2?")), call, *messages(("tool", "3"), ("assistant", "Three."))]
    talk += messages(("user", "2+2?"), ("assistant", "Four."))
    [tokens] = sequences({"messages": talk, "tools": FUNCTIONS}, of=of, longest=4096)
    of_call, *said = learnt(tokens, of)
    assert of_call.endswith("</tool_call><|observation|>")
    assert said == ["\n<think></think>\nThree.<|user|>", "\n<think></think>\nFour.<|user|>"]
    assert of._tokenizer.decode(tokens.ids) == of.render(talk, tools=FUNCTIONS) + "<|user|>"


def test_turns_that_a_template_rewrites_are_refused_or_split():
    of = with_template(THINKING)
    first, second = (
        {"role": "assistant", "content": content, "reasoning_content": f"{content}!"} for content in "AB"
    )
    values = {"messages": [*messages(("user", "a")), first, *messages(("user", "b")), second]}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* rewrites earlier turns once message 3 .*: split"):
        sequences(values, of=of)
    one, two = sequences(values, of=of, rewritten="split")
    assert learnt(one, of) == ["<think>\nA!\n</think>\n\nA<|im_end|>"]
    assert learnt(two, of) == ["<think>\nB!\n</think>\n\nB<|im_end|>"]
    assert two.ids[: two.mask.index(1)] == of.prompt(values["messages"][:3]), "as the model will read it"
    [only] = sequences({"messages": values["messages"][:2]}, of=of)
    assert only == one


LONG = {"messages": messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d" * 50))}


def test_rows_that_are_too_long_are_refused_dropped_or_cut():
    [whole] = sequences(LONG)
    length = len(whole.ids)
    said = rf"rows\.jsonl:1: {length} tokens, over trainer\.sequence_length: {length - 1};"
    with pytest.raises(DataError, match=said):
        sequences(LONG, longest=length - 1)
    assert sequences(LONG, longest=length) == [whole]
    assert sequences(LONG, longest=length - 1, too_long="drop") == []
    [cut] = sequences(LONG, longest=length - 1, too_long="truncate")
    assert (cut.ids, cut.mask) == (whole.ids[:-1], whole.mask[:-1])
    assert sequences(LONG, longest=3, too_long="truncate") == [], "nothing to learn is left"


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        ({"messages": messages(("user", "a"))}, {}, "nothing to learn: no message of assistant"),
        (
            {"prompt": "a", "completion": messages(("user", "b"))},
            {},
            "no message of assistant in its completion",
        ),
        (
            {"messages": messages(("user", "a"), ("assistant", "b<|im_end|>c"))},
            {},
            r"message 1 \(assistant\) holds the template's own <\|im_end\|>",
        ),
    ],
)
def test_rows_without_anything_to_learn_or_with_the_templates_own_marks_are_refused(values, settings, said):
    with pytest.raises(DataError, match=said):
        sequences(values, **settings)


def test_a_template_that_refuses_a_row_is_told_with_its_place():
    of = with_template(
        "{% if messages | length > 3 %}{{ raise_exception('too much') }}{% endif %}" + CHAT_TEMPLATE
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the model's chat template refuses it: too much"):
        sequences({"messages": messages(*TALK)}, of=of)


def test_a_template_whose_answers_begin_otherwise_than_its_prompt_ends_is_refused():
    of = with_template(
        CHAT_TEMPLATE.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>{% endif")
    )
    with pytest.raises(DataError, match=r"begins message 1 \(assistant\) otherwise"):
        sequences({"messages": messages(("user", "a"), ("assistant", "b"))}, of=of)
