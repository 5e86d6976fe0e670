"""Telling a model of its tools where its chat template does not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from stackrl.runtime.environments.base import Message, Tool


def described(messages: Iterable[Message], tools: Sequence[Tool], example: str) -> list[Message]:
    """``messages``, and in the system message that they begin with what can be called, and how."""
    functions = "\n".join(json.dumps(tool.as_function()["function"], ensure_ascii=False) for tool in tools)
    told = f"You can call these functions:\n{functions}\nWrite a call as\n{example}"
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *others]
    return [{"role": "system", "content": told}, first, *others]
