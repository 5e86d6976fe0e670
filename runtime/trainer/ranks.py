"""The trainer's processes: who they are, which cores they use, how they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from stackrl.runtime.interfaces import collectives_at
from stackrl.runtime.run import ADDRESS_VARIABLE, CORES_VARIABLE
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.schemas.degrees import Degrees

MEETING = timedelta(seconds=300)
"""How long ranks wait for each other at the start."""
COLLECTIVE = timedelta(seconds=1800)
"""How long a rank waits for the others in a collective; they may be waiting for their batch or writing."""


class RanksError(Exception):
    """The ranks cannot meet. The text says where and what to look at."""


@dataclass(frozen=True)
class Rank:
    """This process among the trainer's."""

    rank: int
    ranks: int
    local: int
    """Place on its machine: which GPU is its own."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Rank:
        """From RANK, WORLD_SIZE and LOCAL_RANK; alone where they are not set."""
        rank, ranks = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        return cls(rank, ranks, int(environment.get("LOCAL_RANK", rank)))


def claim_cores(threads: int | None) -> None:
    """Stay on the cores that the plan dealt (STACKRL_CORES: `0,1`), a thread on each or ``threads``.

    Cores that this node does not have are left out.
    """
    cores = {int(core) for core in os.environ.get(CORES_VARIABLE, "").split(",") if core}
    cores &= os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    if threads or cores:
        torch.set_num_threads(threads or len(cores))


def join(me: Rank, rendezvous: str, device: str, degrees: Degrees | None = None) -> Meshes:
    """Meet the other ranks at ``rendezvous`` (host:port, opened by rank 0) and divide the work on ``device``.

    ``degrees``: how; by default the model is sharded over all ranks.

    Raises RanksError where that does not happen in time.
    """
    host, _, port = rendezvous.rpartition(":")
    for name, interface in collectives_at(os.environ.get(ADDRESS_VARIABLE, host)).items():
        os.environ.setdefault(name, interface)
    if device == "cuda":
        torch.cuda.set_device(me.local)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=_store(me, host, int(port)),
            rank=me.rank,
            world_size=me.ranks,
            timeout=COLLECTIVE,
        )
    except (OSError, dist.DistError) as error:
        raise RanksError(
            f"trainer rank {me.rank} of {me.ranks} did not meet the others at {rendezvous} within "
            f"{MEETING.seconds} s: {error}"
        ) from error
    return Meshes.of(degrees or Degrees(me.ranks, shard=me.ranks), device)


def broke_off(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank went away or did not answer in time."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)  # gloo has no type of its own


def leave() -> None:
    """Part from the other ranks."""
    dist.destroy_process_group()


def _store(me: Rank, host: str, port: int) -> dist.TCPStore:
    """The store listens on ``host`` alone: left to itself it would listen on every interface."""
    if me.rank:
        return dist.TCPStore(host, port, me.ranks, is_master=False, timeout=MEETING)
    listener = socket.create_server((host, port), backlog=max(128, 2 * me.ranks))
    return dist.TCPStore(
        host,
        port,
        me.ranks,
        is_master=True,
        timeout=MEETING,
        master_listen_fd=listener.detach(),
    )
