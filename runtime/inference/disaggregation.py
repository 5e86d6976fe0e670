"""How a prefill engine hands the keys of a prompt to a decode engine: vLLM's NixlConnector, by UCX.

The decode engine reads them from the prefill engine's memory; where and which, it learns from the answer to
the prefill (client.Engine.prefill). docs/inference.md says what is left to vLLM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from urllib.parse import urlsplit

from stackrl.runtime.interfaces import interface_of, rdma_ports
from stackrl.runtime.launch.ports import free_ports
from stackrl.schemas.stack import Stack

INSTALL = "pip install 'stackrl[disaggregated]'"


def missing() -> str:
    """Why no caches can be moved from this environment; empty where they can."""
    if importlib.util.find_spec("nixl") is None:
        return f"engines for prefill and decode move caches with NIXL, which is not installed: {INSTALL}"
    return ""


def arguments(stack: Stack) -> dict[str, object]:
    """vLLM's arguments for an engine that gives keys away or fetches them."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": stack.device or "cuda",
        # nothing is computed a second time in silence: the orchestrator asks for another prefill
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": lease(stack)},
    }
    return {"kv-transfer-config": transfer}


def lease(stack: Stack) -> int:
    """Seconds for which a prefill engine keeps keys that nobody fetches.

    A decode engine renews this until it has them, by two thirds, but not while it stands still; and what it
    reads after the end is not what was computed. One that stands still for `limits.silence_seconds` is lost.
    """
    return max(round(2 * stack.limits.silence_seconds), 30)


def environment(stack: Stack, url: str, copies: int = 1) -> dict[str, str]:
    """For an engine at ``url``: where it tells of its memory and moves it, on its own interface alone.

    ``copies``: of the model within it, each of which tells of its own.
    """
    host = urlsplit(url).hostname or ""
    found = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_ports_in_a_row(host, copies)),
    }
    if interface := interface_of(host):
        found["UCX_NET_DEVICES"] = ",".join([interface, *rdma_ports()])
    if stack.device == "cpu":
        found["UCX_TLS"] = "tcp,self,sm"
    return found


def _free_ports_in_a_row(host: str, count: int) -> int:
    """The first of them. vLLM binds it half a minute later, and waits for ever where somebody else has it: so
    it is none that the kernel gives to others. Raises OSError where none are found."""
    for _ in range(100):
        [first] = free_ports(1, host)
        with contextlib.suppress(OSError):
            for following in range(first + 1, first + count):
                socket.create_server((host, following)).close()
            return first
    raise OSError(f"no {count} ports in a row are free at {host}")
