"""The ground every typed model stands on: closed, immutable, documented."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"^[0-9]+(\.[0-9]+)?(B|KiB|MiB|GiB|TiB)$"

Size = Annotated[str, Field(pattern=_SIZE, examples=["8GiB"])]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$", examples=["main"])]


class Model(BaseModel):
    """A section of the stack. Unknown keys are errors; values are never converted between types.

    Built when first used (``defer_build``): the command line answers sooner. The text under a field is its
    description in the JSON Schema and in docs/stack.md (schemas/descriptions.py reads it from the source).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, validate_default=True
    )


Section = TypeVar("Section", bound=Model)


def untouched(section: type[Section]) -> Section:
    """The section of which a stack says nothing, as a default. ``section()`` would be the same and build a
    validator of its own for it, beside the one of the whole stack.
    """
    return section.model_construct()


def variant(key: str, default: str | None = None) -> Discriminator:
    """Tells the members of a union apart by ``key``; where it is left out, ``default`` is meant.

    Every member of the union carries ``Tag(value of key)``.
    """

    def tag(value: Any) -> Any:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return found if found is None or isinstance(found, str) else repr(found)

    tag.__name__ = key  # pydantic names it in its errors, and schemas/pydantic_words.py passes the name on
    return Discriminator(tag)


def size_in_bytes(text: str) -> int:
    """``8GiB`` → 8589934592. ``text`` matches Size."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", text).groups()
    return int(float(number) * _UNITS[unit])
