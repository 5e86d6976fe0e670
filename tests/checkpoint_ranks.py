"""Checkpoints of small models on any number of ranks, and what each holds, for tests of what reads them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from loopback import free_port
from rank_processes import on_ranks
from torch import Tensor
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer import checkpoint
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.protocol import Progress
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.step import train_step
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

Weights = dict[str, Tensor]


def saved(meshes: Meshes, model: Path, settings: Trainer, target: Path) -> Weights:
    """Take a step with the model of a folder and leave a checkpoint at ``target``; its weights, as files name
    them. All ranks call it together.
    """
    decoder = build(model, settings, "float32", meshes)
    optimizer = make_optimizer(decoder, AdamW(learning_rate=1e-2))
    batch = make_batches(make_samples(4, seed=1), dist.get_world_size(), 4096)[dist.get_rank()]
    train_step(decoder, optimizer, batch, OBJECTIVES["aipo, token"], rate=1e-2, limit=1.0)
    saver = checkpoint.Saver("cpu")
    saver.begin(target, checkpoint.state_of(decoder, optimizer), Progress(index=1), {}, lambda: None)
    saver.settle()
    return {name: tensor.clone() for name, tensor in gathered(decoder, torch.float32)}


def saved_by_two(cases: dict[str, tuple[Path, Trainer, Degrees]], folder: Path) -> dict[str, Weights]:
    """`saved` for each case on two ranks, at ``folder``/name."""
    file = folder / "weights.pt"
    on_ranks(2, _work, free_port(), cases, folder, file)
    return torch.load(file)


def _work(
    rank: int, port: int, cases: dict[str, tuple[Path, Trainer, Degrees]], folder: Path, file: Path
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    join(Rank(rank, 2, rank), f"127.0.0.1:{port}", "cpu")
    weights = {
        name: saved(Meshes.of(degrees, "cpu"), model, settings, folder / name)
        for name, (model, settings, degrees) in cases.items()
    }
    if rank == 0:
        torch.save(weights, file)
    dist.barrier()
    leave()
