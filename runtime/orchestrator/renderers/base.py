"""What a family of chat templates shares beside the template: how a turn ends, how a call is written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from stackrl.runtime.environments.base import Call, Tool

_BLANKS = re.compile(r"\s*")


class Renderer(ABC):
    """One family. Messages are rendered by the model's own template; what that cannot tell stands here."""

    name: ClassVar[str]
    """As the stack says it."""
    signs: ClassVar[tuple[str, ...]]
    """Texts that all templates of the family hold, and not all of any family that is asked later."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a turn beside the one with which the template closes it."""
    opening: ClassVar[str]
    """What calls begin with, behind whatever else the answer says."""
    example: ClassVar[str]
    """A call as the model writes it, for templates that tell nothing of tools."""

    def recognises(self, template: str) -> bool:
        return all(sign in template for sign in self.signs)

    def around_calls(self, text: str) -> str:
        """What ``text`` says beside its calls."""
        return text.partition(self.opening)[0].strip()

    @abstractmethod
    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        """The calls in ``text``, what the model said behind its thoughts.

        One that cannot be read is a Call with its ``problem``, never an exception.
        """


def blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, str]]:
    """What stands between each ``opening`` and the next ``closing``; the problem where that is missing."""
    while (start := text.find(opening)) >= 0:
        inside, closed, text = text[start + len(opening) :].partition(closing)
        yield inside, "" if closed else f"it does not end with {closing}"


def records(text: str, *fields: tuple[str, str]) -> list[tuple[str, ...]] | None:
    """What ``text`` holds between the tags of ``fields``, over and over; None where it holds anything else.

    A field's opening tag may stand behind blanks; an empty one stands right behind the tag before. Takes time
    in proportion to ``text``, whatever a model wrote there.
    """
    found, place = [], 0
    while (place := _past_blanks(text, place)) < len(text):
        record = []
        for opening, closing in fields:
            start = _past_blanks(text, place) if opening else place
            end = text.find(closing, start + len(opening))
            if not text.startswith(opening, start) or end < 0:
                return None
            record.append(text[start + len(opening) : end])
            place = end + len(closing)
        found.append(tuple(record))
    return found


def _past_blanks(text: str, place: int) -> int:
    return _BLANKS.match(text, place).end()
