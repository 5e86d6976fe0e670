"""A model behind an OpenAI-compatible endpoint: messages in, messages out, no tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from stackrl.runtime.environments.base import Answer, Call, Message, NoRoom, Task, Tool
from stackrl.runtime.orchestrator.policy import as_tool
from stackrl.runtime.orchestrator.renderers.reading import Unreadable, checked, read_json

PATIENCE = 30.0
"""Seconds in which the endpoint tells which models it has."""
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Status codes after which asking again may help."""
_TRIES = 6
_LONGEST_PAUSE = 20.0


class EndpointError(Exception):
    """The endpoint did not answer. The text names it, says why and what to try."""


class Endpoint:
    """One model at one address. Use as an asynchronous context."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        """``url``: the base of the API, to which `/chat/completions` is added."""
        self.url, self.model = url.rstrip("/"), model
        self._key = key

    async def __aenter__(self) -> Endpoint:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def check(self) -> None:
        """Ask whether the model is there. Raises EndpointError; an endpoint without a list is believed."""
        try:
            async with asyncio.timeout(PATIENCE), self._session.get(f"{self.url}/models") as response:
                status, content = response.status, await response.read()
        except TimeoutError:
            raise EndpointError(f"{self.url} did not answer within {PATIENCE:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EndpointError(
                f"{self.url} cannot be reached: {error or type(error).__name__}; does a server run there? "
                "What is asked for is the base of its API, such as http://localhost:8000/v1"
            ) from error
        if status in (401, 403):
            wanted = "wants a key: say --secret NAME, the variable that holds it"
            raise EndpointError(f"{self.url} {'refuses this key' if self._key else wanted}")
        if status == 200 and (names := _models(content)) and self.model not in names:
            raise EndpointError(f"{self.url} has no model {self.model!r}; it has {', '.join(names[:10])}")

    async def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first choice of an answer to ``body``. What may pass is tried again. Raises EndpointError, and
        NoRoom where the model has no room for an answer."""
        for left in reversed(range(_TRIES)):
            status, content = await self._post({**body, "model": self.model})
            if status == 200:
                return _choice(content, self.url)
            why = f"{self.url} answered {status}: {_text(content)[:300]}"
            if status == 400 and "context length" in why:
                raise NoRoom(why)
            if status not in _PASSING or not left:
                raise EndpointError(why)
            await asyncio.sleep(min(0.5 * 2.0 ** (_TRIES - left), _LONGEST_PAUSE))
        raise AssertionError("the last try returns or raises")

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        try:
            # the rollout's own limit ends this
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE)
            address = f"{self.url}/chat/completions"
            async with self._session.post(address, json=body, timeout=timeout) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            return 503, str(error or type(error).__name__).encode()


class EndpointPolicy:
    """As environments know the policy (base.Policy), and as their workers do (workers.worker.WholePolicy)."""

    def __init__(
        self, endpoint: Endpoint, task: Task, tools: Sequence[Tool], sampling: Mapping[str, Any]
    ) -> None:
        """``sampling``: temperature, max_tokens and seed, as requests take them."""
        self._endpoint, self._sampling = endpoint, sampling
        self._tools = tools
        self._history: list[Message] = list(task.messages)
        self._messages: list[Message] = []
        """The model's own, as it gave them."""
        self.answers: list[Answer] = []
        self.tokens = 0
        """That the model wrote, where the endpoint counts them."""
        self.doing = "nothing had begun"
        self.seconds: float | None = None
        """That the rollout may take."""

    async def answer(self, *messages: Message) -> Answer:
        """As base.Policy.answer."""
        self._history += _called(self._history, messages)
        number = await self._ask(self._history, self._tools)
        self._history.append(self._messages[number])
        return self.said(number)

    async def complete(self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """As WholePolicy.complete."""
        messages: list[Message] = []
        for item in history:
            own = "answer" in item
            messages += [self._messages[item["answer"]]] if own else _called(messages, [dict(item)])
        return await self._ask(messages, [as_tool(tool) for tool in tools])

    def said(self, number: int) -> Answer:
        """As WholePolicy.said."""
        if not 0 <= number < len(self.answers):
            raise KeyError(f"there is no answer {number}")
        return self.answers[number]

    def keep(self, numbers: Collection[int]) -> None:
        """Nothing is trained."""

    async def _ask(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """The number of the answer to ``messages``."""
        functions = [tool.as_function() for tool in tools]
        self.doing = f"the endpoint was to give answer {len(self.answers) + 1}"
        body = {**self._sampling, "messages": list(messages), **({"tools": functions} if functions else {})}
        choice = await self._endpoint.complete(body)
        message = choice["message"]
        self.tokens += choice["tokens"]
        calls = message.get("tool_calls") or []
        kept = {"role": "assistant", "content": message.get("content") or ""}
        self._messages.append(kept | ({"tool_calls": calls} if calls else {}))
        closed = choice.get("finish_reason") != "length"
        read = tuple(checked(_call(call), tools) for call in calls)
        self.answers.append(Answer(kept["content"], read, closed))
        self.doing = f"the environment was to judge answer {len(self.answers)}"
        return len(self.answers) - 1


def _called(history: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """``messages`` whose results of tools name the calls of the last answer that they belong to, in order."""
    last = next((message for message in reversed(history) if message["role"] == "assistant"), {})
    names = iter([call["id"] for call in last.get("tool_calls", ()) if "id" in call])
    return [
        {**message, "tool_call_id": next(names, "none")}
        if message["role"] == "tool" and "tool_call_id" not in message
        else message
        for message in messages
    ]


def _call(written: Mapping[str, Any]) -> Call:
    """As the model wrote it, its arguments not yet compared with those of the tool."""
    function = written.get("function") or {}
    name, arguments = str(function.get("name") or ""), function.get("arguments") or "{}"
    try:  # most endpoints give text, some what they have read of it
        read = read_json(arguments) if isinstance(arguments, str) else arguments
    except Unreadable as error:
        return Call(name, problem=f"the arguments cannot be read: {error}")
    return Call(name, read) if isinstance(read, dict) else Call(name, problem="the arguments are no object")


def _models(content: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(content)["data"]]
    except (KeyError, TypeError, ValueError):
        return []


def _choice(content: bytes, url: str) -> Mapping[str, Any]:
    """With its message, and how many tokens it has. Raises EndpointError."""
    try:
        answer = msgspec.json.decode(content)
        choice = answer["choices"][0]
        choice["message"].get("content")
        return {**choice, "tokens": int((answer.get("usage") or {}).get("completion_tokens") or 0)}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise EndpointError(f"{url} gave no chat completion: {_text(content)[:200]!r}") from error


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
