"""The ground every typed model stands on: closed, immutable, documented."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"^[0-9]+(\.[0-9]+)?(B|KiB|MiB|GiB|TiB)$"

Size = Annotated[str, Field(pattern=_SIZE, examples=["8GiB"])]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]


class Model(BaseModel):
    """A section of the stack. Unknown keys are errors; values are never converted between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True
    )


def size_in_bytes(text: str) -> int:
    """``8GiB`` → 8589934592. ``text`` matches Size."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", text).groups()
    return int(float(number) * _UNITS[unit])
