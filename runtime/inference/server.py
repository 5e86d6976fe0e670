"""The command and the environment that make a vLLM server of an engine of the stack.

What vLLM does is stated here in full: also flags whose default is the same today, so that a new version of
vLLM cannot change a run silently.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stackrl.runtime.inference import disaggregation
from stackrl.runtime.inference.plugin import BACKEND
from stackrl.runtime.interfaces import collectives_at
from stackrl.runtime.run import CORES_VARIABLE
from stackrl.schemas.base import size_in_bytes
from stackrl.schemas.engine_arguments import refusal
from stackrl.schemas.pools import gpus_of_engine, inference_of, role_of
from stackrl.schemas.roles import Pool
from stackrl.schemas.stack import Stack

SERVED_NAME = "policy"
KEEP_ALIVE = 60
"""Seconds that the server keeps an idle connection. The client drops its end earlier."""

PREFILL_TOKENS = 4096
"""Tokens that an engine on CPU prefills in one step, at least."""


def command(
    stack: Stack, model: Path, url: str, gpu_bytes: int | None = None, pool: Pool = "inference"
) -> list[str]:
    """The server's command line. ``gpu_bytes``: the memory of one GPU, needed where an engine shares it;
    ``pool``: the key under `roles:` that the engine belongs to.

    Raises ValueError where `inference.arguments` names what is decided elsewhere.
    """
    address, inference, role = urlsplit(url), inference_of(stack, pool), role_of(stack, pool)
    arguments = {
        "model": str(model),
        "served-model-name": SERVED_NAME,
        "host": address.hostname,
        "port": address.port,
        "dtype": stack.model.dtype,
        "tensor-parallel-size": inference.tensor_parallel,
        "data-parallel-size": role.data_parallel,
        "enable-expert-parallel": role.expert_parallel,
        "max-model-len": inference.max_model_length,
        "max-num-seqs": inference.max_requests,
        "seed": stack.seed,
        # tokens in, tokens out
        "skip-tokenizer-init": True,
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "logprobs-mode": "processed_logprobs",
        "enable-return-routed-experts": stack.trainer.mixture.router_replay,
        "generation-config": "vllm",
        # prompts of one version share their cache; what an update does to it is in docs/weights.md
        "enable-prefix-caching": True,
        "enable-chunked-prefill": True,
        "weight-transfer-config": {"backend": BACKEND},
        # closed to strangers, and quiet
        "middleware": "stackrl.runtime.inference.middleware.TokenMiddleware",
        "disable-fastapi-docs": True,
        "disable-uvicorn-access-log": True,
        "enable-log-requests": False,
        "uvicorn-log-level": "warning",
    }
    if stack.inference.quantization:
        arguments["quantization"] = stack.inference.quantization
    arguments |= _on_cpu(stack) if stack.device == "cpu" else _on_gpu(stack, gpu_bytes)
    if pool != "inference":
        arguments |= disaggregation.arguments(stack)
    arguments |= _further(stack, pool)
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_flags(arguments)]


def environment(
    stack: Stack, url: str, base: Mapping[str, str] = os.environ, pool: Pool = "inference"
) -> dict[str, str]:
    """The server's environment: ``base``, the run's token included, and what vLLM reads from it."""
    host = urlsplit(url).hostname or ""
    result = {
        **collectives_at(host),
        **base,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause it and replace its weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE),
        "VLLM_HOST_IP": host,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # the model is a folder of the run: nothing is looked up
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    result.pop("VLLM_API_KEY", None)
    if pool != "inference":
        result |= disaggregation.environment(stack, url, role_of(stack, pool).data_parallel)
    if stack.trainer.mixture.router_replay:
        result["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older one cannot tell which experts were chosen
    if stack.device == "cpu":
        # vLLM binds its workers' threads itself; the processes that only talk need one
        bound = _bound(base.get(CORES_VARIABLE, ""), gpus_of_engine(stack, pool))
        result |= {"VLLM_CPU_OMP_THREADS_BIND": bound, "OMP_NUM_THREADS": "1"}
        result.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule --kv-cache-memory-bytes
    return result


def _bound(cores: str, workers: int) -> str:
    """``cores``, such as `0,1`, dealt to the engine's processes that compute; too few are shared in turn."""
    if not cores or workers == 1:
        return cores or "auto"
    given = cores.split(",")
    each = max(len(given) // workers, 1)
    starts = [number * each % len(given) for number in range(workers)]
    return "|".join(",".join(given[start : start + each]) for start in starts)


def shares_gpu(stack: Stack) -> bool:
    """Whether the engine runs on the trainer's own GPU."""
    return stack.roles.inference is not None and stack.roles.inference.share is not None


def _on_cpu(stack: Stack) -> dict[str, object]:
    return {
        "enforce-eager": True,
        "kv-cache-memory-bytes": size_in_bytes(stack.inference.cache_memory),
        # after a part of a prefill vLLM 0.32 turns the request's own generator back, which a generator of
        # the CPU cannot do: the engine would die of any seeded request whose prompt is cut
        "enable-chunked-prefill": False,
        # vLLM wants room for the longest prompt and for a token of each request
        "max-num-batched-tokens": max(
            stack.inference.max_model_length, stack.inference.max_requests, PREFILL_TOKENS
        ),
    }


def _on_gpu(stack: Stack, gpu_bytes: int | None) -> dict[str, object]:
    share = stack.inference.gpu_memory
    if shares_gpu(stack) and stack.roles.inference.engine_memory:
        if not gpu_bytes:
            raise ValueError("roles.inference.engine_memory needs a GPU, and none is visible")
        share = round(size_in_bytes(stack.roles.inference.engine_memory) / gpu_bytes, 4)
    return {"enforce-eager": not stack.inference.compile, "gpu-memory-utilization": share}


def _further(stack: Stack, pool: Pool) -> dict[str, object]:
    for where, section in (("inference", stack.inference), (f"roles.{pool}", role_of(stack, pool))):
        for name in section.arguments:
            if why := refusal(name):
                raise ValueError(f"{where}.arguments.{name} {why}; remove it here")
    return inference_of(stack, pool).arguments


def _flags(arguments: Mapping[str, object]) -> Iterator[str]:
    for name, value in arguments.items():
        match value:
            case bool():
                yield f"--{name}" if value else f"--no-{name}"
            case dict() | list():
                yield from (f"--{name}", json.dumps(value))
            case _:
                yield from (f"--{name}", str(value))
