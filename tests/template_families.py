"""Chat templates of several families with small tokenizers, and answers as each family writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stackrl.runtime.environments.base import Message, Tool
from stackrl.runtime.orchestrator.chat import Chat

FOLDER = Path(__file__).parent / "chat_templates"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
MINIMAX = ("]~!b[", "]~b]", "[e~[")
LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
LLAMA_LIKE = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>"
    "{% if m.role == 'tool' %}ipython<|end_header_id|>\n\n{{ m.content | tojson }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "assistant<|end_header_id|>\n\n{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Of the shape of Llama 3.1's: calls without text, one at a time, and results of tools as JSON."""


@dataclass(frozen=True)
class Family:
    """One template, and what is expected of it."""

    name: str
    renderer: str
    marks: tuple[str, ...]
    thinks: bool = False
    """Whether its answers begin with thoughts."""
    several: bool = True
    """Whether one answer may call more than once."""

    text: str = ""
    """The template; empty where it lies in chat_templates/."""

    @property
    def template(self) -> str:
        return self.text or (FOLDER / f"{self.name}.jinja").read_text()

    @property
    def chat(self) -> Chat:
        return _chat(self)


FAMILIES = (
    Family("qwen2_5", "chatml", CHATML),
    Family("qwen3", "qwen3", CHATML, thinks=True),
    Family("qwen3_5", "qwen3_coder", CHATML, thinks=True),
    Family("glm_4_6", "glm", GLM, thinks=True),
    Family("glm_4_7", "glm", GLM, thinks=True),
    Family("minimax_m2", "minimax_m2", MINIMAX, thinks=True),
    Family("llama_like", "llama3", LLAMA, several=False, text=LLAMA_LIKE),
)
TOOLS = (
    Tool(
        "add",
        "Adds two numbers.",
        {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    ),
    Tool(
        "note",
        "Keeps a text.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "loud": {"type": "boolean"},
            },
            "required": ["text"],
            "additionalProperties": False,
        },
    ),
)
FUNCTIONS = [tool.as_function() for tool in TOOLS]


@cache
def _chat(family: Family) -> Chat:
    return Chat(tokenizer_of(family.template, family.marks), family.name)


def tokenizer_of(template: str, marks: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has learnt some words of ``template``, with its marks as tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([template], trainer)
    trained.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained)
    tokenizer.chat_template = template
    tokenizer.bos_token = next((mark for mark in marks if mark == "<|begin_of_text|>"), None)
    return tokenizer


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """A call as templates take it."""
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def written(chat: Chat, history: Sequence[Message], answer: Message) -> str:
    """What the template makes of ``answer`` behind the prompt of ``history``, up to the end of the turn."""
    prompt = chat.render(history, generate=True, tools=FUNCTIONS)
    whole = chat.render([*history, answer], tools=FUNCTIONS)
    assert whole.startswith(prompt), f"{whole[-200:]!r} does not continue {prompt[-60:]!r}"
    said = whole[len(prompt) :]
    return said.rpartition(chat.stop_text)[0] if chat.stop_text in said else said


def answer_of(family: Family, number: int) -> Message:
    """A tool-calling answer as the template takes it."""
    calls = [called("add", a=number, b=2.5)]
    if family.several and number % 2:
        calls.append(called("note", text=f'it\'s "{number}"', tags=["x"], loud=True))
    said = {"tool_calls": calls, "content": "" if family.renderer == "llama3" else f"Call {number}."}
    thought = {"reasoning_content": f"I must add {number}."} if family.thinks else {}
    return {"role": "assistant", **said, **thought}


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
