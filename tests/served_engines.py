"""Fake engines as a run has them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from stackrl.runtime.orchestrator.engines import Engines
from stackrl.schemas.inference import PullWeights


@asynccontextmanager
async def serving(*engines):
    """The engines, served while the context is open."""
    together = Engines(engines, 8, PullWeights())
    task = asyncio.create_task(together.serve(lambda name, **fields: None, 5))
    yield together
    task.cancel()
