"""What a row says: a conversation, checked before anything is tokenised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from stackrl.runtime.data.files import DataError, Row
from stackrl.schemas.data import Role

Message = dict[str, Any]
ROLES = get_args(Role)
_SHOWN = 60


@dataclass(frozen=True)
class Document:
    """One conversation. The first ``given`` messages are only read, whatever their roles."""

    place: str
    messages: Sequence[Message]
    given: int = 0
    tools: Sequence[dict[str, Any]] = field(default=())
    """What the template tells the model of its tools."""


def document(row: Row) -> Document:
    """The conversation of ``row``: its `messages`, or its `prompt` and `completion`.

    A prompt of text is a user's message, a completion of text the assistant's answer. Raises DataError with
    the row's place.
    """
    values = row.values
    tools = _tools(row)
    if "messages" in values:
        return Document(row.place, _messages(row, "messages"), tools=tools)
    if "prompt" in values and "completion" in values:
        prompt, completion = (
            [{"role": role, "content": values[key]}] if isinstance(values[key], str) else _messages(row, key)
            for key, role in (("prompt", "user"), ("completion", "assistant"))
        )
        return Document(row.place, [*prompt, *completion], given=len(prompt), tools=tools)
    keys = ", ".join(map(str, values)) or "none"
    raise DataError(
        f"{row.place}: a row has the key messages, or the keys prompt and completion; this one has: {keys}"
    )


def _messages(row: Row, key: str) -> list[Message]:
    found = row.values[key]
    if not isinstance(found, list) or not found:
        what = "empty" if found == [] else _shown(found)
        raise DataError(f"{row.place}: {key} is a list of messages (role, content), not {what}")
    return [_message(f"{row.place}: {key}[{number}]", message) for number, message in enumerate(found)]


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{place}: a message has role and content, this is {_shown(message)}")
    if (role := message.get("role")) not in ROLES:
        raise DataError(f"{place}: role is one of {', '.join(ROLES)}, not {_shown(role)}")
    content = message.get("content")
    if (
        content is None
        and role == "assistant"
        and (message.get("tool_calls") or message.get("reasoning_content"))
    ):
        return message | {"content": ""}  # templates ask for it
    if not isinstance(content, str):
        raise DataError(f"{place}: content is text, not {_shown(content)}")
    return message


def _tools(row: Row) -> Sequence[dict[str, Any]]:
    tools = row.values.get("tools") or ()
    if isinstance(tools, str):  # tools of different shapes fit no column but one of text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{row.place}: tools is not JSON: {error}") from error
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{row.place}: tools is a list of objects, not {_shown(tools)}")
    return tools


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:_SHOWN]
