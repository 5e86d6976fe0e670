"""A server of vLLM with another model, asked about tokens: a fixed reference, or a teacher.

Any version of vLLM that answers `/v1/completions` will do. It is asked with the policy's token ids, so its
model must have the policy's tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from stackrl.runtime.inference.answers import LEAST_LOGPROB, Generation, read_prompt_logprobs
from stackrl.runtime.transport.messages import Span, Version

RETRY_AFTER = 1.0
_LONGEST_PAUSE = 20.0
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes after which asking again may help."""


class ReferenceFailed(RuntimeError):
    """A server that did not do what it was asked to. Names it and says why."""


class ReferenceRefused(ReferenceFailed):
    """It answers, and does not take this request: the sequence is too long for it, for example."""


class ReferenceMisnamed(ReferenceFailed):
    """It answers, and does not know us or the model: trying again does not mend that."""


class ReferenceServer:
    """Client of one server. Any number of callers may ask at once; ``requests`` of them are served."""

    def __init__(self, endpoint: str, model: str, key: str | None, requests: int, timeout: float) -> None:
        """``endpoint``: its address, with or without /v1; ``timeout``: seconds for an answer, with
        repetitions."""
        self._url = f"{endpoint.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._model, self._key, self._timeout = model, key, timeout
        self.room = asyncio.Semaphore(requests)
        """A place for one request, taken by the caller."""
        self._session: aiohttp.ClientSession | None = None

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of each token after those before it, at temperature 1: float32 [T], 0 for the first.

        Raises ReferenceFailed.
        """
        body = {"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, "seed": 0}
        choice = await self._ask(body)
        try:
            return await asyncio.to_thread(read_prompt_logprobs, choice, tokens)
        except ValueError as error:
            raise ReferenceFailed(f"{self._url} ({self._model}): {error}") from error

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[int],
        version: Version,
    ) -> Generation:
        """Sample an answer to the prompt ``tokens``. Its tokens are labelled with ``version``: they are as
        new as the weights that they are to be compared with. Raises ReferenceFailed.
        """
        body = {
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop_token_ids": list(stop),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # nothing of them is made text for us
            "skip_special_tokens": False,
        }
        choice = await self._ask(body)
        try:
            sampled, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if not sampled or len(sampled) != len(logprobs):
                raise ValueError(f"{len(logprobs)} logprobs for {len(sampled)} tokens")
            return Generation(
                tokens=list(sampled),
                logprobs=[max(float(logprob), LEAST_LOGPROB) for logprob in logprobs],
                spans=[Span(0, len(sampled), version)],
                finish_reason="stop" if sampled[-1] in stop else "length",
                cached=0,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReferenceFailed(f"{self._url} answered something else than tokens: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice that it answers. Asks again, ever more rarely, until the time is over."""
        deadline, pause, why = time.monotonic() + self._timeout, RETRY_AFTER, ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                return await self._post({"model": self._model, **body}, left)
            except _Passing as error:
                why = str(error)
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise ReferenceFailed(
            f"{self._url} ({self._model}) did not answer within algorithm.reference.timeout, "
            f"{self._timeout:g} s: {why}; see whether it runs"
        )

    async def _post(self, body: dict[str, Any], within: float) -> dict[str, Any]:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(total=within)
        try:
            async with self._session.post(self._url, json=body, timeout=limit) as response:
                status, text = response.status, await response.text()
        except TimeoutError as error:
            raise _Passing(f"no answer in {within:.4g} s") from error
        except aiohttp.ClientError as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        if status in _PASSING:
            raise _Passing(f"it answered {status}: {text[:300]}")
        if status in (401, 403, 404):
            hint = "see algorithm.reference: endpoint, model and secret"
            raise ReferenceMisnamed(f"{self._url} ({self._model}) answered {status}: {text[:300]}; {hint}")
        if status != 200:
            raise ReferenceRefused(f"{self._url} ({self._model}) answered {status}: {text[:300]}")
        try:
            # of a long sequence it is megabytes, for which no other rollout is to wait
            [choice] = (await asyncio.to_thread(json.loads, text))["choices"]
        except (ValueError, KeyError, TypeError) as error:
            raise ReferenceFailed(f"{self._url} answered no completion: {text[:200]!r}") from error
        return choice


class _Passing(Exception):
    """What may be over when it is asked again."""
