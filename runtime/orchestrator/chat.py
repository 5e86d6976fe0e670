"""From messages to token ids and back, without ever tokenising what the model sampled.

A turn's prompt is the last prompt, the ids that were sampled, and the *delta*: what the chat template puts
between the model's answer and its next one. The delta is found by rendering a made-up history with and
without the environment's message; what is new must come after what was there. Both are rendered as text
and the delta starts with the special token that closes a turn, so no token merges across its edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackrl.runtime.environments.base import Message, assistant, user

_ANSWER = "stackrl-answer-4f1d"
"""Stands for the model's answer in the made-up history; unlike anything in a template."""
_SAMPLE_MESSAGE = user("stackrl-message")


class TemplateError(Exception):
    """A chat template that cannot be continued token by token. The text names it and says why."""


class Chat:
    """A tokenizer and its chat template. ``stop`` is the id of the token that closes the model's turn."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """``name`` is for errors. Raises TemplateError where the template cannot be continued."""
        self._tokenizer, self._name = tokenizer, name
        if not tokenizer.chat_template:
            raise TemplateError(f"{name} has no chat template; name a model that was made for chats")
        closing = self._encode(self._after_answer([]))
        if not closing or closing[0] not in tokenizer.added_tokens_decoder:
            raise TemplateError(
                f"the chat template of {name} does not close the model's turn with a special token, so that "
                f"no engine can tell where an answer ends (it goes on with {self._after_answer([])[:40]!r})"
            )
        self.stop: int = closing[0]
        self.stop_text: str = tokenizer.convert_ids_to_tokens(self.stop)
        self.delta([_SAMPLE_MESSAGE])

    @classmethod
    def load(cls, model: Path) -> Chat:
        """The tokenizer of a Hugging Face folder: its tokenizer.json, as every fast tokenizer has one.

        AutoTokenizer would do the same and import torch, which takes seconds.
        """
        from transformers import PreTrainedTokenizerFast

        if not (model / "tokenizer.json").is_file():
            raise TemplateError(f"{model} has no tokenizer.json; convert its tokenizer to a fast one")
        return cls(PreTrainedTokenizerFast.from_pretrained(model), str(model))

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Ids of a whole history, up to where the model's next answer begins."""
        return self._encode(self.render(list(messages), generate=True))

    def answer(self, text: str) -> list[int]:
        """Ids of an answer that was not sampled, closed."""
        return [*self._encode(text), self.stop]

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

    def text(self, sampled: Sequence[int]) -> str:
        """What an answer says, without the token that closes it."""
        content = sampled[:-1] if self.closed(sampled) else sampled
        return self._tokenizer.decode(content, skip_special_tokens=False)

    def closed(self, sampled: Sequence[int]) -> bool:
        """Whether the model ended its turn; otherwise it was cut off."""
        return bool(sampled) and sampled[-1] == self.stop

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Ids from the close of the model's turn, over ``messages``, to where its next answer begins.

        Raises TemplateError where the template rewrites what came before.
        """
        before, after = self._after_answer([]), self._after_answer(messages)
        if not after.startswith(before):
            raise TemplateError(
                f"the chat template of {self._name} rewrites the end of a turn when a "
                f"{messages[0]['role']!r} message follows: {before[:60]!r} becomes {after[:60]!r}"
            )
        return self._encode(after)

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """What the template writes after an answer of the model that ``messages`` follow."""
        text = self.render([_SAMPLE_MESSAGE, assistant(_ANSWER), *messages], generate=bool(messages))
        _, found, rest = text.rpartition(_ANSWER)
        if not found:
            raise TemplateError(f"the chat template of {self._name} drops the model's earlier answers")
        return rest

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
