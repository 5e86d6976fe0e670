"""One vLLM server, as the orchestrator sees it: token ids in, token ids with logprobs and versions out."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from stackrl.runtime.inference.server import KEEP_ALIVE, SERVED_NAME
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.messages import MessageError, Span, Version

FIRST_LABEL = "default"
"""vLLM's label for the weights that it started with."""
FIRST_VERSION = Version(0, 0)
BROKEN_LABEL = "incomplete update"
"""Our label for weights of which only a part may be new. It is no version, so such tokens are refused."""
LEAST_LOGPROB = -1000.0
"""vLLM writes -9999 for what is not finite."""
CONTROL_TIMEOUT = 60.0
"""Seconds for a call that only passes an order on: resume, label, version."""


_JSON = {"Content-Type": "application/json"}
log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """An engine that did not do what it was asked to. Names the engine and the operation."""


class EngineLost(EngineError):
    """An engine that cannot be reached or gives no answer. It may come back, with its first weights."""


@dataclass(frozen=True)
class Generation:
    """A reply of T tokens; ``logprobs`` float [T] at the sampling temperature.

    The stop token, if it was sampled, is the last token. ``spans`` cover the T tokens. ``cached`` counts
    tokens of the prompt whose keys were in the engine's prefix cache. ``routes``, from an engine that tells
    them: of each token but the last, from the one that was asked for on, prompt included, the experts that it
    went through, int8 or int16 [tokens, layers, experts per token] as in Sample.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: Literal["stop", "length"]
    cached: int
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of one update: until running requests stood still, the transfer with its loading, all of it."""

    pause: float
    load: float
    total: float


class Engine:
    """Client of one vLLM server. Any number of requests may run at once."""

    def __init__(self, url: str, token: str, *, timeout: float = 600) -> None:
        self.url = url.rstrip("/")
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
    ) -> Generation:
        """Sample a reply to the prompt ``tokens``: up to ``max_tokens`` and up to the engine's length.

        Only ``stop_token_ids`` end a reply earlier. Requests with the same ``salt`` share cached prompts. An
        engine that tells routes does so from the prompt's token ``routes_from`` on.
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
        answer = await self._call("POST", "/inference/v1/generate", body, self._timeout, keep_alive=True)
        try:
            return _read_generation(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.url}: generate {request_id}: {error}") from error

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of each token after those before it, at temperature 1: float32 [T], 0 for the first.

        One token more must fit into the engine's length. Raises EngineError.
        """
        body = {
            "model": SERVED_NAME,
            "token_ids": list(tokens),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "seed": 0, "detokenize": False},
        }
        answer = await self._call("POST", "/inference/v1/generate", body, self._timeout, keep_alive=True)
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
            return _read_label(label)
        except MessageError as error:
            raise EngineError(f"engine {self.url}: {error}") from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float, keep_alive: bool = False
    ) -> Any:
        """The JSON that a route answers. Raises EngineLost without an answer, EngineError on a refusal."""
        operation = f"engine {self.url}: {method} {path.partition('?')[0]}"
        try:
            async with self._session(keep_alive).request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=None if body is None else _JSON,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            raise EngineLost(f"{operation} got no answer in {timeout:.4g} s") from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise EngineLost(f"{operation} failed: {reason}; see the engine's log") from error
        if response.status != 200:
            raise EngineError(f"{operation} answered {response.status}: {_reason(_text(content))}")
        try:
            return msgspec.json.decode(content)  # an answer of many tokens must not keep others waiting
        except (ValueError, msgspec.DecodeError) as error:
            raise EngineError(f"{operation} answered no JSON: {_text(content)[:200]!r}") from error

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


def read_prompt_logprobs(answer: dict[str, Any], tokens: Sequence[int]) -> np.ndarray:
    """vLLM's `prompt_logprobs`: float32 [T], 0 for the first token. Raises ValueError for anything else."""
    told = answer.get("prompt_logprobs")
    if not isinstance(told, list) or len(told) != len(tokens):
        found = len(told) if isinstance(told, list) else "no"
        raise ValueError(f"logprobs of {found} tokens came for {len(tokens)}; is it a server of vLLM?")
    result = np.zeros(len(tokens), dtype="<f4")
    try:
        for place in range(1, len(tokens)):
            result[place] = max(float(told[place][str(tokens[place])]["logprob"]), LEAST_LOGPROB)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no logprob of token {tokens[place]} at {place} came: {error!r}") from error
    if not (result <= 1e-3).all():
        raise ValueError(f"what came are no logprobs: the largest is {result.max():g}")
    return result


def _read_generation(answer: dict[str, Any]) -> Generation:
    """Raises KeyError, TypeError or ValueError where the answer is not a whole generation."""
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    content = choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise ValueError("the logprobs are not those of the sampled tokens")
    logprobs = [entry["logprob"] for entry in content]
    if logprobs and (min(logprobs) <= LEAST_LOGPROB or max(logprobs) > 0):
        raise ValueError("the engine sampled a token whose logprob is not finite")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"the request ended by {choice['finish_reason']!r}")
    spans = [
        Span(span["start"], span["end"], _read_label(span["version"])) for span in choice["weight_versions"]
    ]
    ends = [0, *(span.end for span in spans)]
    if ends != [*(span.start for span in spans), len(tokens)] or any(s.start >= s.end for s in spans):
        raise ValueError("the version spans do not cover the tokens")
    details = answer["usage"].get("prompt_tokens_details") or {}
    written = choice.get("routed_experts")
    return Generation(
        tokens,
        logprobs,
        spans,
        choice["finish_reason"],
        details.get("cached_tokens") or 0,
        None if written is None else _read_routes(written),
    )


def _read_routes(written: str) -> np.ndarray:
    """Of an array in numpy's own format, in base64. Raises ValueError where it is anything else."""
    file = io.BytesIO(base64.b64decode(written, validate=True))
    routes = np.lib.format.read_array(file, allow_pickle=False)
    if routes.ndim != 3 or routes.dtype.kind != "u":
        raise ValueError(f"its routes are {routes.dtype} {list(routes.shape)}, not [tokens, layers, experts]")
    return routes.astype("|i1" if routes.max(initial=0) <= np.iinfo("|i1").max else "<i2")


def _read_label(label: str) -> Version:
    """Raises MessageError for a label that is no version, as after a failed update."""
    if label == BROKEN_LABEL:
        raise MessageError("its weights are of no version since an update failed; update it again")
    return FIRST_VERSION if label == FIRST_LABEL else Version.parse(label)


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
