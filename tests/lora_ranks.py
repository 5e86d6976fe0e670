"""Optimizer steps of adapters on any number of ranks, for tests that compare them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from loopback import free_port
from rank_processes import on_ranks
from torch import Tensor
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.step import train_step
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.lora import Lora
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

OPTIMIZER = AdamW(learning_rate=1e-2, epsilon=1e-6)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Whole tensors, by name."""

    before: Tensors
    """The adapters at the start."""
    after: Tensors
    """And after some steps."""
    merged: Tensors
    """The model then."""


def adapted(path: Path, meshes: Meshes, settings: Lora, dtype: str = "float32") -> Decoder:
    return build(path, Trainer(lora=settings, head_chunk=32), dtype, meshes, seed=3)


def adapters(decoder: Decoder) -> Tensors:
    """Copies, whole."""
    return {name: tensor.clone() for name, tensor in lora.adapters(decoder)}


def steps(decoder: Decoder, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Each with samples of its own."""
    for number in numbers:
        batch = make_batches(make_samples(8, seed=number), dist.get_world_size(), 4096)[dist.get_rank()]
        train_step(decoder, optimizer, batch, OBJECTIVES["aipo, token"], rate=1e-2, limit=1.0)


def trained(path: Path, meshes: Meshes, settings: Lora) -> Trained:
    """After three steps."""
    decoder = adapted(path, meshes, settings)
    before = adapters(decoder)
    steps(decoder, make_optimizer(decoder, OPTIMIZER), range(3))
    return Trained(before, adapters(decoder), dict(gathered(decoder, torch.float32)))


def on_two_ranks(dense: Path, mixture: Path, settings: Lora, folder: Path) -> dict[str, Trained]:
    """What `trained` gives for each model, and for the mixture also with its experts shared by the ranks."""
    file = folder / "trained.pt"
    on_ranks(2, _work, free_port(), dense, mixture, settings, file)
    return torch.load(file, weights_only=False)


def _work(rank: int, port: int, dense: Path, mixture: Path, settings: Lora, file: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    meshes = join(Rank(rank, 2, rank), f"127.0.0.1:{port}", "cpu")
    shared = Meshes.of(Degrees(2, shard=2, expert=2), "cpu")
    results = {
        "dense": trained(dense, meshes, settings),
        "mixture": trained(mixture, meshes, settings),
        "mixture, shared": trained(mixture, shared, settings),
    }
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    leave()
