"""What a vLLM server answers, read and checked: replies with logprobs and versions, and prefilled prompts."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from stackrl.runtime.transport.messages import MessageError, Span, Version

FIRST_LABEL = "default"
"""vLLM's label for the weights that it started with."""
FIRST_VERSION = Version(0, 0)
BROKEN_LABEL = "incomplete update"
"""Our label for weights of which only a part may be new. It is no version, so such tokens are refused."""
LEAST_LOGPROB = -1000.0
"""vLLM writes -9999 for what is not finite."""


@dataclass(frozen=True)
class Generation:
    """A reply of T tokens; ``logprobs`` float [T] at the sampling temperature.

    The stop token, if it was sampled, is the last token. ``spans`` cover the T tokens. ``cached`` counts
    tokens of the prompt whose keys were in the engine's prefix cache.
    ``routes``, from an engine that tells them: of each token but the last, from the one that was asked for
    on, prompt included, the experts that it went through, int8 or int16 [tokens, layers, experts per token]
    as in Sample. ``prefilled``: where a prefill engine made the prompt's keys, the version that it had.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: Literal["stop", "length"]
    cached: int
    routes: np.ndarray | None = None
    prefilled: Version | None = None


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose keys wait in a prefill engine until a decode engine has fetched them."""

    version: Version
    """Of the weights that the keys were computed with."""
    cached: int
    """Tokens of the prompt whose keys were there before."""
    transfer: dict[str, Any]
    """What the decode engine needs to fetch them, in vLLM's words."""


def read_prefilled(answer: dict[str, Any]) -> Prefilled:
    """Raises KeyError, TypeError or ValueError where the answer is not that of a prefill engine."""
    [choice] = answer["choices"]
    transfer = answer.get("kv_transfer_params")
    if not isinstance(transfer, dict) or not transfer.get("remote_block_ids"):
        raise ValueError(
            "it keeps no keys for a decode engine; was it started as an engine of roles.prefill?"
        )
    return Prefilled(read_label(choice["weight_versions"][-1]["version"]), _cached(answer), transfer)


def whole(stream: bytes) -> dict[str, Any]:
    """The parts of a streamed reply as the one answer that a reply at once is.

    Raises ValueError where it broke off, or tells of an error.
    """
    parts = [msgspec.json.decode(event[6:]) for event in stream.split(b"\n\n") if event[6:7] == b"{"]
    if not stream.rstrip().endswith(b"[DONE]"):
        raise ValueError("the reply broke off")
    for part in parts:
        if "choices" not in part:
            raise ValueError(str(part.get("error", part))[:500])
    choices = [choice for part in parts for choice in part["choices"]]
    together = {
        "token_ids": [token for choice in choices for token in choice["token_ids"] or ()],
        "logprobs": {"content": [entry for choice in choices for entry in choice["logprobs"]["content"]]},
        "finish_reason": choices[-1]["finish_reason"],
        "weight_versions": choices[-1]["weight_versions"],
    }
    return {"choices": [together], "usage": parts[-1]["usage"]}


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


def read_generation(answer: dict[str, Any]) -> Generation:
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
        Span(span["start"], span["end"], read_label(span["version"])) for span in choice["weight_versions"]
    ]
    ends = [0, *(span.end for span in spans)]
    if ends != [*(span.start for span in spans), len(tokens)] or any(s.start >= s.end for s in spans):
        raise ValueError("the version spans do not cover the tokens")
    written = choice.get("routed_experts")
    return Generation(
        tokens,
        logprobs,
        spans,
        choice["finish_reason"],
        _cached(answer),
        None if written is None else _read_routes(written),
    )


def _read_routes(written: str) -> np.ndarray:
    """Of an array in numpy's own format, in base64. Raises ValueError where it is anything else."""
    file = io.BytesIO(base64.b64decode(written, validate=True))
    routes = np.lib.format.read_array(file, allow_pickle=False)
    if routes.ndim != 3 or routes.dtype.kind != "u":
        raise ValueError(f"its routes are {routes.dtype} {list(routes.shape)}, not [tokens, layers, experts]")
    return routes.astype("|i1" if routes.max(initial=0) <= np.iinfo("|i1").max else "<i2")


def read_label(label: str) -> Version:
    """Raises MessageError for a label that is no version, as after a failed update."""
    if label == BROKEN_LABEL:
        raise MessageError("its weights are of no version since an update failed; update it again")
    return FIRST_VERSION if label == FIRST_LABEL else Version.parse(label)


def _cached(answer: dict[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
