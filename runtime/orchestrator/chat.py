"""From messages to token ids and back, without ever tokenising what the model sampled.

A turn's prompt is the last prompt, the ids that were sampled, and the *delta*: what the chat template puts
between the model's answer and its next one. The delta is found by rendering a made-up history with and
without the environment's messages; what is new must come after what was there. Both are rendered as text
and the delta starts with the special token that ends a turn, so no token merges across its edges.

Thoughts of earlier turns stay in the prompt as they were sampled, also where a template would drop them,
unless the stack says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stackrl.runtime.environments.base import Answer, Call, Message, Tool, assistant, user
from stackrl.runtime.orchestrator.renderers import renderer_of
from stackrl.runtime.orchestrator.renderers.described import described
from stackrl.runtime.orchestrator.renderers.reading import checked
from stackrl.schemas.model import Speaking

_ANSWER = "stackrl-answer-4f1d"
"""Stands for the model's answer in the made-up history; unlike anything in a template."""
_SAMPLE_MESSAGE = user("stackrl-message")
_SAMPLE_TOOL = Tool("stackrl-tool-71c3", "", {"type": "object", "properties": {}})
_SAMPLE_THOUGHT = "stackrl-thought-2b90"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


class TemplateError(Exception):
    """A chat template that cannot be continued token by token. The text names it and says why."""


class Chat:
    """A tokenizer and its chat template.

    ``stops`` are the ids with which the model may end its turn; ``stop``, the first of them, closes answers
    that were not sampled.
    """

    def __init__(self, tokenizer: Any, name: str, speaking: Speaking | None = None) -> None:
        """``name`` is for errors. Raises TemplateError where the template cannot be continued."""
        speaking = speaking or Speaking()
        self._tokenizer, self._name = tokenizer, name
        self._keeps_thoughts = speaking.thoughts == "keep"
        if not tokenizer.chat_template:
            raise TemplateError(f"{name} has no chat template; name a model that was made for chats")
        self._renderer = renderer_of(tokenizer.chat_template, speaking.renderer)
        self._ends: dict[bool, str] = {}
        """See _end_of_answer."""
        self._closing = self._closing_token()
        """What the template writes behind an answer; None where the next turn's opening ends it."""
        self.stops: tuple[int, ...] = self._stops()
        self.stop: int = self.stops[0]
        self.stop_text: str = tokenizer.convert_ids_to_tokens(self.stop)
        _, found, rest = self.render([_SAMPLE_MESSAGE], generate=True).rpartition(_THOUGHT)
        self._thought = "" if rest.strip() else found + rest
        """What the template begins each answer with, where that opens the model's thoughts."""
        self.delta([_SAMPLE_MESSAGE])

    @classmethod
    def load(cls, model: Path, speaking: Speaking) -> Chat:
        """The tokenizer of a Hugging Face folder: its tokenizer.json, as every fast tokenizer has one.

        AutoTokenizer would do the same and import torch, which takes seconds.
        """
        from transformers import PreTrainedTokenizerFast

        if not (model / "tokenizer.json").is_file():
            raise TemplateError(f"{model} has no tokenizer.json; convert its tokenizer to a fast one")
        return cls(PreTrainedTokenizerFast.from_pretrained(model), str(model), speaking)

    def prompt(self, messages: Iterable[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a whole history, up to where the model's next answer begins.

        ``tools`` are told as the template tells them; where it does not, in a system message.
        """
        functions = [tool.as_function() for tool in tools]
        if tools and not self._tells_tools:
            messages, functions = described(messages, tools, self._renderer.example), []
        return self._encode(self.render(list(messages), generate=True, tools=functions))

    def answer(self, text: str, then: Sequence[Message] = ()) -> list[int]:
        """Ids of an answer that was not sampled, closed; ``then`` are the messages that follow it."""
        if self._thought and _THOUGHT_END not in text:
            text = f"{self._thought.removeprefix(_THOUGHT)}{_THOUGHT_END}{self._thought_margin}{text}"
        return [*self._encode(text), self.delta(then)[0] if then else self.stop]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool = False, tools: Sequence[Any] = ()
    ) -> str:
        """What the template makes of ``messages``; ``generate``: up to where the model's answer begins."""
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generate, tools=list(tools) or None
        )

    def encode_after(self, text: str, *, closed: bool) -> list[int]:
        """Ids of a part of a conversation's text; ``closed``: as it follows a token that closes a turn.

        Without, as at the very beginning, where some tokenizers set a blank.
        """
        return self._encode(self.stop_text + text)[1:] if closed else self._encode(text)

    @property
    def closes_turns(self) -> bool:
        """Whether turns end with a token of their own; else with the one that opens the next turn."""
        return self._closing is not None

    def opening(self, text: str) -> str:
        """The special token that ``text`` begins with; empty where there is none."""
        ids = self._encode(text)
        known = bool(ids) and ids[0] in self._tokenizer.added_tokens_decoder
        return self._tokenizer.convert_ids_to_tokens(ids[0]) if known else ""

    def text(self, sampled: Sequence[int]) -> str:
        """What an answer says, without the token that closes it."""
        content = sampled if self.end(sampled) is None else sampled[:-1]
        return self._tokenizer.decode(content, skip_special_tokens=False)

    def end(self, sampled: Sequence[int]) -> int | None:
        """The token with which the model ended its turn; None where it was cut off."""
        return sampled[-1] if sampled and sampled[-1] in self.stops else None

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[Call, ...]:
        """The calls of ``tools`` in an answer, in order; one that is wrong has its ``problem``."""
        if not tools:
            return ()
        return tuple(checked(call, tools) for call in self._renderer.calls(self._said(text), tools))

    @property
    def opens_thoughts(self) -> bool:
        """Whether each answer begins within thoughts, which the template has opened."""
        return bool(self._thought)

    def thought(self, text: str) -> bool:
        """Whether an answer has thoughts that are over."""
        return _THOUGHT_END in text

    def forgets(self, messages: Sequence[Message]) -> bool:
        """Whether thoughts before ``messages`` are to be dropped when those come."""
        if self._keeps_thoughts:
            return False
        *before, answer = _history(_calls_for(messages))
        answer["content"] = f"{_THOUGHT}\n{_SAMPLE_THOUGHT}\n{_THOUGHT_END}\n\n{_ANSWER}"
        return _SAMPLE_THOUGHT not in self.render([*before, answer, *messages], generate=True)

    def remembered(self, answer: Answer) -> Message:
        """``answer`` as the template takes it for a history: its calls apart from its text."""
        if not answer.calls or any(call.problem for call in answer.calls):
            return assistant(answer.text)
        said = self._said(answer.text)
        thought = answer.text[: len(answer.text) - len(said)]
        calls = [_called(call.name, call.arguments) for call in answer.calls]
        return {**assistant(thought + self._renderer.around_calls(said)), "tool_calls": calls}

    def delta(self, messages: Sequence[Message], end: int | None = None) -> list[int]:
        """Ids from behind the model's answer, over ``messages``, to where its next answer begins.

        ``end`` is the token with which the answer ended, if it did; otherwise the ids start with one. Where
        a turn is ended by the token that opens the next one, and the model thought of another one than what
        comes, both stand there. Raises TemplateError where the template rewrites what came before.
        """
        before, after = self._end_of_answer(_calls_for(messages)), self._after_answer(messages)
        if not after.startswith(before):
            raise TemplateError(
                f"the chat template of {self._name} rewrites the end of a turn when a "
                f"{messages[0]['role']!r} message follows: {before[:60]!r} becomes {after[:60]!r}"
            )
        ids = self._encode(after)
        closed = end is not None and (self.closes_turns or end == ids[0])
        return ids[1:] if closed else ids

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """What the template writes from the end of an answer on, over ``messages``, to the next answer."""
        calling = _calls_for(messages)
        text = self.render([*_history(calling), *messages], generate=True)
        return self._behind_answer(text, calling)

    def _end_of_answer(self, calling: bool) -> str:
        """What the template writes behind an answer that nothing follows, for example ``<|im_end|>``."""
        if calling not in self._ends:
            self._ends[calling] = self._behind_answer(self.render(_history(calling)), calling)
        return self._ends[calling]

    def _behind_answer(self, text: str, calling: bool) -> str:
        _, found, rest = text.rpartition(_ANSWER)
        if not found:
            raise TemplateError(f"the chat template of {self._name} drops the model's earlier answers")
        if not calling:
            return rest
        ends = [place for token in self._stop_texts if (place := rest.find(token)) >= 0]
        return rest[min(ends) :] if ends else ""

    def _closing_token(self) -> int | None:
        ids = self._encode(self._end_of_answer(calling=False))
        return ids[0] if ids and ids[0] in self._tokenizer.added_tokens_decoder else None

    def _stops(self) -> tuple[int, ...]:
        known = self._tokenizer.get_added_vocab()
        stops = [known[text] for text in self._renderer.ends if text in known]
        if self._closing is not None:
            stops = [self._closing, *(stop for stop in stops if stop != self._closing)]
        if not stops:
            raise TemplateError(
                f"the chat template of {self._name} does not close the model's turn with a special token, so "
                f"that no engine can tell where an answer ends (it goes on with "
                f"{self._end_of_answer(calling=False)[:40]!r})"
            )
        return tuple(stops)

    @cached_property
    def _stop_texts(self) -> list[str]:
        return self._tokenizer.convert_ids_to_tokens(list(self.stops))

    @cached_property
    def _tells_tools(self) -> bool:
        return _SAMPLE_TOOL.name in self.render([_SAMPLE_MESSAGE], tools=[_SAMPLE_TOOL.as_function()])

    @property
    def _thought_margin(self) -> str:
        """What parts thoughts from the answer, where a line break parts them from their tag."""
        return "\n\n" if self._thought.endswith("\n") else ""

    def _said(self, text: str) -> str:
        """An answer without the thoughts that it begins with."""
        if not self._thought and not text.lstrip().startswith(_THOUGHT):
            return text
        return text.partition(_THOUGHT_END)[2]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _calls_for(messages: Sequence[Message]) -> bool:
    """Whether a tool speaks first: then the answer before must be a call, or some templates refuse."""
    return messages[0]["role"] == "tool"


def _history(calling: bool) -> list[Message]:
    """A made-up history that ends with an answer."""
    if not calling:
        return [_SAMPLE_MESSAGE, assistant(_ANSWER)]
    return [_SAMPLE_MESSAGE, {**assistant(_ANSWER), "tool_calls": [_called(_ANSWER, {})]}]


def _called(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call as templates take it."""
    return {"type": "function", "id": "stackrl01", "function": {"name": name, "arguments": dict(arguments)}}
