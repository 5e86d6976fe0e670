"""The loss of held-out rows on several ranks, for tests that compare it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from loopback import free_port
from trainer_ranks import on_ranks
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.validation import validate
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.trainer import Trainer


def held_out() -> list[Sample]:
    return [msgspec.structs.replace(sample, temperature=1.0) for sample in make_samples(9, seed=11)]


def measured(ranks: int, model: Path, folder: Path) -> list[float]:
    """The loss of `held_out`, and that of its first row, of which all ranks but one have nothing."""
    file = folder / "losses.pt"
    on_ranks(ranks, _measure, ranks, free_port(), model, file)
    return torch.load(file)


def _measure(rank: int, ranks: int, port: int, model: Path, file: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    decoder = build(model, Trainer(), "float32", join(Rank(rank, ranks, rank), f"127.0.0.1:{port}", "cpu"))
    losses = []
    for samples in (held_out(), held_out()[:1]):
        batch = make_batches(samples, ranks, capacity=64)[rank]
        losses.append(validate(decoder, batch.micro_batches)["validation_loss"])
        assert sum(tensor.numel() for _, tensor in gathered(decoder, torch.float32)), "as before a step"
    if rank == 0:
        torch.save(losses, file)
    dist.barrier()
    leave()
