"""Processes of ranks that compute together, forked from one that has imported torch and the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import multiprocessing

multiprocessing.set_forkserver_preload(["stackrl.runtime.trainer.run", "torch._dynamo", "trainer_runs"])


def on_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work(rank, *arguments)`` in ``ranks`` processes; raises what one of them raises."""
    multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


@contextmanager
def alone() -> Iterator[None]:
    """This process as the only rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
