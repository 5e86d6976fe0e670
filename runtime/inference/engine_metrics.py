"""What a vLLM server tells of itself, read from the text of its route /metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_GAUGES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
_DEFERRED = 'reason="deferred"'


@dataclass(frozen=True)
class EngineMetrics:
    """One look at an engine: the first four say how it is now, the others count from its start."""

    cache_use: float
    """Share of its KV cache that unfinished requests hold, from 0 to 1."""
    running: int
    """Requests in its batches."""
    queued: int
    """Requests that wait for room in the cache or in a batch."""
    arriving: int
    """Requests that hold room in the cache and wait for their keys from another engine."""
    preemptions: int
    """Times that a running request lost its room and was put back into the queue."""
    prompt_tokens: int
    """Prompt tokens that were looked for in the prefix cache."""
    prompt_hits: int
    """Of these, those that were found."""
    fetched_tokens: int
    """Prompt tokens whose keys came from another engine."""
    fetched_bytes: float
    """Of these keys."""


def read_metrics(text: str) -> EngineMetrics:
    """Read what /metrics answers; copies of the model in one server are taken together.

    Raises ValueError where it is not vLLM's.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, labels, value in _LINE.findall(text):
        if name == "num_requests_waiting_by_reason":
            if _DEFERRED in labels:
                found["deferred"].append(float(value))
        else:
            found[name].append(float(value))
    for name in _GAUGES:
        if not found[name]:
            raise ValueError(f"/metrics tells no vllm:{name}")
    arriving = sum(found["deferred"])
    return EngineMetrics(
        cache_use=max(found["kv_cache_usage_perc"]),
        running=int(sum(found["num_requests_running"])),
        queued=int(sum(found["num_requests_waiting"]) - arriving),
        arriving=int(arriving),
        preemptions=int(sum(found["num_preemptions_total"])),
        prompt_tokens=int(sum(found["prefix_cache_queries_total"])),
        prompt_hits=int(sum(found["prefix_cache_hits_total"])),
        fetched_tokens=int(sum(found["external_prefix_cache_hits_total"])),
        fetched_bytes=sum(found["nixl_bytes_transferred_sum"]),
    )
