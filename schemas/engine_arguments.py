"""Which arguments vLLM's server has, and which of them a stack may not name, because the run decides them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

RESERVED = {
    "model": "model",
    "served-model-name": "the client of the engines",
    "dtype": "model.dtype",
    "quantization": "inference.quantization",
    "seed": "seed",
    "host": "endpoints",
    "port": "endpoints",
    "uds": "endpoints",
    "grpc": "endpoints",
    "api-key": "the run's token",
    "middleware": "the run's token",
    "disable-fastapi-docs": "the run's token",
    "config": "this file",
    "tensor-parallel-size": "inference.tensor_parallel",
    "pipeline-parallel-size": "roles",
    "data-parallel-": "roles",
    "enable-expert-parallel": "roles",
    "kv-transfer-config": "roles",
    "max-model-len": "inference.max_model_length",
    "max-num-seqs": "inference.max_requests",
    "kv-cache-memory-bytes": "inference.cache_memory",
    "gpu-memory-utilization": "inference.gpu_memory",
    "device-memory-utilization": "inference.gpu_memory",
    "enforce-eager": "inference.compile",
    "skip-tokenizer-init": "the orchestrator, which works with tokens",
    "enable-scale-out": "the orchestrator, which works with tokens",
    "enable-prompt-tokens-details": "the orchestrator, which counts cached tokens",
    "logprobs-mode": "the trainer, which needs the logprobs that were sampled from",
    "enable-return-routed-experts": "trainer.mixture.router_replay",
    "aux-output-config": "trainer.mixture.router_replay",
    "generation-config": "sampling",
    "override-generation-config": "sampling",
    "enable-prefix-caching": "weights.kv",
    "enable-chunked-prefill": "the device",
    "weight-transfer-config": "weights",
    "disable-uvicorn-access-log": "the run's logs",
    "enable-log-requests": "the run's logs",
    "uvicorn-log-level": "the run's logs",
}
"""Arguments of vLLM that are decided elsewhere, and where. One that ends in a dash stands for a family."""

LIST = Path(__file__).with_name("vllm_arguments.json")
"""Every argument of the vLLM that engines run on; a test compares it with vLLM's own parser."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_.+-]+)?")


def refusal(name: str) -> str | None:
    """Why ``name`` may not stand in `inference.arguments`; None where it may.

    vLLM's parser takes `_` for `-`, `no-` for the opposite, `a.b` for the part b of a, and any unique
    beginning of a name for the name.
    """
    if not _NAME.fullmatch(name):
        return "is not the name of an argument, written without dashes in front and without its value"
    plain = name.replace("_", "-").partition(".")[0].removeprefix("no-")
    for reserved, decider in RESERVED.items():
        if reserved.startswith(plain) or (reserved.endswith("-") and plain.startswith(reserved)):
            return f"is decided by {decider}"
    return None


@cache
def names() -> frozenset[str]:
    """All arguments of vLLM's server, without dashes in front."""
    return frozenset(json.loads(LIST.read_text())["names"])
