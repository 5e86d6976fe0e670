"""One vLLM server, as the orchestrator sees it: token ids in, token ids with logprobs and versions out."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np

from stackrl.runtime.inference.answers import (
    BROKEN_LABEL,
    Generation,
    Prefilled,
    read_generation,
    read_label,
    read_prefilled,
    read_prompt_logprobs,
    whole,
)
from stackrl.runtime.inference.engine_metrics import EngineMetrics, read_metrics
from stackrl.runtime.inference.server import KEEP_ALIVE, SERVED_NAME
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import MessageError, Version
from stackrl.schemas.roles import Pool

CONTROL_TIMEOUT = 60.0
"""Seconds for a call that only passes an order on: resume, label, version."""
GENERATE = "/inference/v1/generate"
"""vLLM's route that takes tokens and gives tokens."""
_JSON = {"Content-Type": "application/json"}
_A, _T = TypeVar("_A"), TypeVar("_T")
log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """An engine that did not do what it was asked to. Names the engine and the operation."""


class EngineLost(EngineError):
    """An engine that cannot be reached or gives no answer. It may come back, with its first weights."""


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of one update: until running requests stood still, the transfer with its loading, all of it."""

    pause: float
    load: float
    total: float


class Engine:
    """Client of one vLLM server. Any number of requests may run at once."""

    def __init__(self, url: str, token: str, *, timeout: float = 600, pool: Pool = "inference") -> None:
        """``pool``: the key under `roles:` that it belongs to."""
        self.url, self.pool = url.rstrip("/"), pool
        self._token = token
        self._timeout = timeout
        self._updating = asyncio.Lock()
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def wait_ready(self, timeout: float) -> None:
        """Return when the server answers. Raises EngineError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        reason = "it was not asked"
        while time.monotonic() < deadline:
            try:
                async with self._session(keep_alive=False).get(
                    f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=10)
                ) as response:
                    if response.status == 200:
                        return
                    reason = f"it answered {response.status}: {await response.text()}"
                    if response.status == 401:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            await asyncio.sleep(0.2)
        raise EngineError(f"engine {self.url} was not ready within {timeout:g} s ({reason}); see its log")

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        salt: str,
        stop_token_ids: Sequence[int],
        request_id: str,
        routes_from: int = 0,
        prefilled: Prefilled | None = None,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Sample a reply to the prompt ``tokens``: up to ``max_tokens`` and up to the engine's length.

        Only ``stop_token_ids`` end a reply earlier. Requests with the same ``salt`` share cached prompts. An
        engine that tells routes does so from the prompt's token ``routes_from`` on. ``prefilled``: where the
        prompt's keys are fetched from; they have arrived when ``on_first_token`` is called.
        When the caller is cancelled, so is the request in the engine. Raises EngineError.
        """
        body = {
            "model": SERVED_NAME,
            "request_id": request_id,
            "token_ids": list(tokens),
            "cache_salt": salt,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "seed": seed,
                "stop_token_ids": list(stop_token_ids),
                "ignore_eos": True,  # stop_token_ids alone decide, whatever the model's config says
                "logprobs": 0,  # of the sampled token, and of no other
                "detokenize": False,
                "routed_experts_prompt_start": routes_from,
            },
        }
        if prefilled is None:
            answer = await self._call("POST", GENERATE, body, self._timeout, keep_alive=True)
            return self._read(read_generation, answer, request_id)
        body["kv_transfer_params"] = prefilled.transfer
        # the first token alone, then the rest at once
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["sampling_params"]["stream_interval"] = max_tokens + 1
        stream = await self._content("POST", GENERATE, body, self._timeout, True, on_first_token)
        generation = self._read(read_generation, self._read(whole, stream, request_id), request_id)
        return replace(generation, prefilled=prefilled.version)

    async def prefill(self, tokens: Sequence[int], *, salt: str, request_id: str) -> Prefilled:
        """Compute the keys of the prompt ``tokens`` and keep them for a decode engine, which is to fetch them
        soon. Only an engine of `roles.prefill` does. Raises EngineError."""
        body = {
            "model": SERVED_NAME,
            "request_id": request_id,
            "token_ids": list(tokens),
            "cache_salt": salt,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        answer = await self._call("POST", GENERATE, body, self._timeout, keep_alive=True)
        return self._read(read_prefilled, answer, request_id)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of each token after those before it, at temperature 1: float32 [T], 0 for the first.

        One token more must fit into the engine's length. Raises EngineError.
        """
        body = {
            "model": SERVED_NAME,
            "token_ids": list(tokens),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "seed": 0, "detokenize": False},
        }
        answer = await self._call("POST", GENERATE, body, self._timeout, keep_alive=True)
        try:
            return await asyncio.to_thread(read_prompt_logprobs, answer, tokens)
        except ValueError as error:
            raise EngineError(f"engine {self.url}: {error}") from error

    async def version(self, within: float = CONTROL_TIMEOUT) -> Version:
        """The version of the weights that the engine holds, asked of the process that runs the model.

        Raises EngineError after a failed update, EngineLost without an answer ``within`` seconds.
        """
        return self._version_of(await self._label(within))

    async def settle(self) -> Version | None:
        """Undo what another client has left half done. The version then held, or None: of no version.

        A client that dies in an update leaves the engine paused, maybe within the bracket: with new weights
        under the old label. So a paused engine loses its label, then its bracket is ended, then it goes on.
        """
        async with self._updating:
            label = await self._label(CONTROL_TIMEOUT)
            paused = await self._call("GET", "/is_paused", None, CONTROL_TIMEOUT)
            if paused["is_paused"] or label == BROKEN_LABEL:
                await self._mark_broken()
                await self._call("POST", "/resume", None, CONTROL_TIMEOUT)
                return None
        return self._version_of(label)

    async def update(
        self, version: Version, source: str, kv: Literal["keep", "recompute"], timeout: float
    ) -> UpdateTimes:
        """Load ``version`` from ``source`` (a weight server's URL or a folder) while requests run.

        Running requests stand still meanwhile and go on with the new weights; ``kv`` says whether on the
        keys that the old weights cached or on recomputed ones (docs/weights.md). Raises EngineError: the
        engine then generates on, but what it samples is refused until an update succeeds. Raises EngineLost
        where it does not answer or ``timeout`` seconds are over: it may then stand still until `settle`.
        """
        async with self._updating:
            return await self._update(version, source, kv, timeout)

    async def fetched_bytes(self) -> float:
        """Of keys that a decode engine has got from prefill engines since its start. Raises EngineError."""
        told = _text(await self._content("GET", "/metrics", None, CONTROL_TIMEOUT, False))
        lines = [line for line in told.splitlines() if line.startswith("vllm:nixl_bytes_transferred_sum")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def metrics(self, within: float = CONTROL_TIMEOUT) -> EngineMetrics:
        """How busy it is. Raises EngineError."""
        told = _text(await self._content("GET", "/metrics", None, within, True))
        return self._read(read_metrics, told, "metrics")

    async def forget_prompts(self, within: float = CONTROL_TIMEOUT) -> None:
        """Empty the prefix cache. Raises EngineError where requests still hold it after so many seconds."""
        deadline = time.monotonic() + within
        while not (await self._call("POST", "/reset_prefix_cache", None, within))["success"]:
            if time.monotonic() > deadline:
                raise EngineError(f"engine {self.url}: its prefix cache was in use for {within:g} s")
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _update(self, version: Version, source: str, kv: str, timeout: float) -> UpdateTimes:
        began = time.monotonic()

        async def step(path: str, body: dict[str, Any] | None = None) -> None:
            await self._call("POST", path, body, max(0.001, began + timeout - time.monotonic()))

        try:
            await step(f"/pause?mode=keep&clear_cache={'true' if kv == 'recompute' else 'false'}")
            paused = time.monotonic()
            try:
                await step("/start_weight_update")
                update = {"source": source, "version": str(version), "timeout": timeout}
                await step("/update_weights", {"update_info": update})
                await step("/finish_weight_update", {"weight_version": str(version)})
            except EngineLost:
                raise
            except BaseException:
                await asyncio.shield(self._mark_broken())
                raise
            loaded = time.monotonic()
        except EngineLost:  # nobody would answer; what is left open is settled when somebody does
            raise
        except BaseException:
            await asyncio.shield(self._call("POST", "/resume", None, CONTROL_TIMEOUT))
            raise
        await self._call("POST", "/resume", None, CONTROL_TIMEOUT)
        return UpdateTimes(pause=paused - began, load=loaded - paused, total=time.monotonic() - began)

    async def _mark_broken(self) -> None:
        """Take the engine's label away, and end a bracket that may still be open."""
        await self._call("POST", "/update_weight_version", {"new_version": BROKEN_LABEL}, CONTROL_TIMEOUT)
        try:
            await self._call("POST", "/finish_weight_update", {}, CONTROL_TIMEOUT)
        except EngineLost:
            raise
        except EngineError as error:  # none was open, or the worker that failed has ended it
            log.debug("%s", error)

    async def _label(self, within: float) -> str:
        return (await self._call("GET", "/weight_info", None, within))["weight_version"]

    def _version_of(self, label: str) -> Version:
        try:
            return read_label(label)
        except MessageError as error:
            raise EngineError(f"engine {self.url}: {error}") from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float, keep_alive: bool = False
    ) -> Any:
        """The JSON that a route answers. Raises EngineLost without an answer, EngineError on a refusal."""
        content = await self._content(method, path, body, timeout, keep_alive)
        try:
            return msgspec.json.decode(content)  # an answer of many tokens must not keep others waiting
        except (ValueError, msgspec.DecodeError) as error:
            operation = f"engine {self.url}: {method} {path.partition('?')[0]}"
            raise EngineError(f"{operation} answered no JSON: {_text(content)[:200]!r}") from error

    async def _content(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout: float,
        keep_alive: bool,
        on_first_part: Callable[[], None] = lambda: None,
    ) -> bytes:
        """What a route answers. Raises EngineLost without an answer, EngineError on a refusal."""
        operation = f"engine {self.url}: {method} {path.partition('?')[0]}"
        parts: list[bytes] = []
        try:
            async with self._session(keep_alive).request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=None if body is None else _JSON,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                async for part in response.content.iter_any():
                    if not parts:
                        on_first_part()
                    parts.append(part)
        except TimeoutError as error:
            raise EngineLost(f"{operation} got no answer in {timeout:.4g} s") from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise EngineLost(f"{operation} failed: {reason}; see the engine's log") from error
        if response.status != 200:
            raise EngineError(f"{operation} answered {response.status}: {_reason(_text(b''.join(parts)))}")
        return b"".join(parts)

    def _read(self, reader: Callable[[_A], _T], answer: _A, request_id: str) -> _T:
        """What ``reader`` makes of an answer. Raises EngineError where it is not what it should be."""
        try:
            return reader(answer)
        except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise EngineError(f"engine {self.url}: generate {request_id}: {error}") from error

    def _session(self, keep_alive: bool) -> aiohttp.ClientSession:
        """Generation keeps its connections; an order gets one of its own.

        vLLM closes a connection after an error without saying so, and the order that follows must not fail.
        """
        if keep_alive not in self._sessions:
            life = {"keepalive_timeout": KEEP_ALIVE / 2} if keep_alive else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=0, **life)
            self._sessions[keep_alive] = aiohttp.ClientSession(
                connector=connector, headers=bearer(self._token)
            )
        return self._sessions[keep_alive]


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _reason(text: str) -> str:
    """The message in one of the several shapes in which vLLM answers an error."""
    try:
        error = json.loads(text)
    except ValueError:
        return text[:500]
    for key in ("error", "message", "detail"):
        if isinstance(error, dict) and key in error:
            error = error[key]
    return str(error)[:500]
