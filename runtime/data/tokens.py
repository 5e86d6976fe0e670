"""A conversation's tokens, and which of them are learnt: exactly those that the chosen roles wrote.

The text is what the chat template makes of the messages. It is cut where a learnt message begins, behind
its header, and where it ends, behind its end-of-turn token, and the pieces are tokenised one by one: as in
a rollout, where the engine reads a prompt and samples the rest, no token reaches over such a cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stackrl.runtime.data.files import DataError
from stackrl.runtime.data.rows import Document, Message
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.schemas.data import Data

_MARK = "stackrl-content-8c2e"
"""Stands for a message's content where its header is looked for; unlike anything in a template."""


@dataclass
class Tokens:
    """One training sequence: ids, and for each 1 where it is learnt, else 0."""

    ids: list[int]
    mask: list[int]

    def add(self, ids: Sequence[int], *, learnt: bool) -> None:
        self.ids += ids
        self.mask += [int(learnt)] * len(ids)


class Tokenizing:
    """How documents become sequences, under a chat template and a stage's settings."""

    def __init__(self, chat: Chat, data: Data, longest: int) -> None:
        """``longest``: tokens that a sequence may have."""
        self._chat, self._learn = chat, frozenset(data.learn)
        self._split, self._too_long, self._longest = data.rewritten == "split", data.too_long, longest

    def sequences(self, document: Document) -> list[Tokens]:
        """Of one document: one; none where it is dropped; several where its turns are split.

        Raises DataError with the document's place.
        """
        try:
            found = list(self._rendered(document))
        except DataError:
            raise
        except Exception as error:  # templates are programs that raise what they like
            raise DataError(f"{document.place}: the model's chat template refuses it: {error}") from error
        if not found:
            roles = " or ".join(sorted(self._learn))
            where = " in its completion" if document.given else ""
            raise DataError(f"{document.place}: there is nothing to learn: no message of {roles}{where}")
        return [short for tokens in found if (short := self._shortened(document, tokens))]

    def _rendered(self, document: Document) -> Iterator[Tokens]:
        """Walk over the learnt messages; ``text`` is what the sequence holds so far."""
        tokens, text = Tokens([], []), ""
        for number, message in enumerate(document.messages):
            if number < document.given or message["role"] not in self._learn:
                continue
            header = self._header(document, number)
            if not header.startswith(text):
                if not self._split:
                    raise DataError(
                        f"{document.place}: the model's chat template rewrites earlier turns once message "
                        f"{number} follows, so that they are not what the model would have written; say "
                        "data.rewritten: split, which makes a sequence of each such turn"
                    )
                yield tokens
                tokens, text = Tokens([], []), ""
            written, end = self._written(document, number, header)
            tokens.add(self._chat.encode_after(header[len(text) :], closed=bool(text)), learnt=False)
            for piece in (written, end):
                tokens.add(self._chat.encode_after(piece, closed=True), learnt=True)
            text = header + written + end
        if text:
            yield tokens

    def _header(self, document: Document, number: int) -> str:
        """Everything up to where message ``number`` begins to speak."""
        messages = document.messages[: number + 1]
        if messages[-1]["role"] == "assistant":
            return self._chat.render(messages[:-1], generate=True, tools=document.tools)
        marked: Message = {**messages[-1], "content": _MARK}
        return self._chat.render([*messages[:-1], marked], tools=document.tools).rpartition(_MARK)[0]

    def _written(self, document: Document, number: int, header: str) -> tuple[str, str]:
        """What message ``number`` says behind ``header``, and the token that ends its turn."""
        whole = self._chat.render(document.messages[: number + 1], tools=document.tools)
        role, stop = document.messages[number]["role"], self._chat.stop_text
        if not whole.startswith(header):
            raise DataError(
                f"{document.place}: the model's chat template begins message {number} ({role}) otherwise "
                f"than the prompt of an answer ends: {header[-40:]!r} does not stand before it"
            )
        if not self._chat.closes_turns:
            return whole[len(header) :], self._chat.opening(self._following(document, number, whole)) or stop
        written, *rest = whole[len(header) :].split(stop)
        if len(rest) != 1:
            how = "holds" if rest else "does not end with"
            raise DataError(f"{document.place}: message {number} ({role}) {how} the template's own {stop}")
        return written, stop

    def _following(self, document: Document, number: int, whole: str) -> str:
        """What the template writes behind ``whole`` for the message after ``number``."""
        more = self._chat.render(document.messages[: number + 2], tools=document.tools)
        return more[len(whole) :] if more.startswith(whole) else ""

    def _shortened(self, document: Document, tokens: Tokens) -> Tokens | None:
        """``tokens``, or what is left of them; None where they are dropped."""
        if len(tokens.ids) <= self._longest:
            return tokens
        if self._too_long == "error":
            raise DataError(
                f"{document.place}: {len(tokens.ids)} tokens, over trainer.sequence_length: {self._longest}; "
                "raise that, or say data.too_long: drop (or truncate)"
            )
        cut = Tokens(tokens.ids[: self._longest], tokens.mask[: self._longest])
        return cut if self._too_long == "truncate" and any(cut.mask) else None
