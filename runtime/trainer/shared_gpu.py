"""One GPU for trainer and engine: the engine takes its part first, the trainer is held to what is left."""

from __future__ import annotations

import time

import httpx
import torch

from stackrl.runtime.transport.auth import bearer

ENGINE_LIMIT = 1800.0
"""Seconds until the engine serves; it has taken its memory then."""
HEADROOM = 0.05
"""Share of what is left that stays free: an engine that loads new weights holds a layer more for a moment."""


class SharedGpuError(Exception):
    """The engine that shares the trainer's GPU did not come up."""


def take_what_is_left(engine: str, token: str, limit: float = ENGINE_LIMIT) -> None:
    """Wait for the engine at the URL ``engine``, then cap this process's memory. Raises SharedGpuError."""
    wait_for_engine(engine, token, limit)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(free / total * (1 - HEADROOM))


def wait_for_engine(engine: str, token: str, limit: float) -> None:
    """Return when the engine answers that it serves. Raises SharedGpuError after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    reason = "it was not asked"
    with httpx.Client(headers=bearer(token), timeout=10) as http:
        while time.monotonic() < deadline:
            try:
                response = http.get(f"{engine}/health")
            except httpx.TransportError as error:
                reason = str(error)
            else:
                if response.is_success:
                    return
                reason = f"it answered {response.status_code}"
            time.sleep(0.5)
    raise SharedGpuError(
        f"the engine {engine} on the trainer's GPU did not serve within {limit:.0f} s ({reason}); see its log"
    )
