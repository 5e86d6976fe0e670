"""Processes of ranks that compute together, forked from one that has imported torch and the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import multiprocessing

multiprocessing.set_forkserver_preload(["stackrl.runtime.trainer.run", "torch._dynamo", "trainer_runs"])


def on_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work(rank, *arguments)`` in ``ranks`` processes; raises what one of them raises."""
    multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")
