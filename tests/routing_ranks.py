"""Steps of a mixture of experts whose load is balanced, on any number of ranks; the first replays routes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from loopback import free_port
from rank_processes import on_ranks
from torch import Tensor
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.routing import routers
from stackrl.runtime.trainer.step import train_step
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

BALANCE_RATE = 0.02
TWO_RANKS = {
    "sharded": Degrees(2, shard=2),
    "copies": Degrees(2, replicate=2),
    "expert": Degrees(2, shard=2, expert=2),
    "context": Degrees(2, context=2),
}


@dataclass(frozen=True)
class Steps:
    """What two steps give, and the biases after them."""

    metrics: list[dict[str, float]]
    biases: dict[int, Tensor]


def steps(meshes: Meshes, model: Path, *, settings: Trainer | None = None, capacity: int = 4096) -> Steps:
    """All ranks of ``meshes`` call it together."""
    decoder = build(model, settings or Trainer(), "float32", meshes)
    optimizer = make_optimizer(decoder, AdamW(epsilon=1e-6))
    shares = meshes.context.ranks
    metrics = []
    for number in range(2):
        samples = make_samples(13, seed=number)
        if number == 0:
            samples = [routed(sample, decoder) if i % 3 else sample for i, sample in enumerate(samples)]
        batches = make_batches(samples, dist.get_world_size() // shares, capacity)
        batch = batches[dist.get_rank() // shares]
        step = train_step(
            decoder,
            optimizer,
            batch,
            OBJECTIVES["aipo, token"],
            rate=1e-3,
            limit=1.0,
            balance_rate=BALANCE_RATE,
        )
        metrics.append(step.metrics)
    biases = {layer: router.e_score_correction_bias.clone() for layer, router in routers(decoder).items()}
    return Steps(metrics, biases)


def routed(sample: Sample, decoder: Decoder) -> Sample:
    """With experts in every layer of ``decoder`` that no router has chosen."""
    layers, (router, *_) = len(decoder.model.layers), routers(decoder).values()
    rng = np.random.default_rng(len(sample.tokens))
    shape = (len(sample.tokens), layers, router.number)
    experts = rng.permuted(np.broadcast_to(np.arange(router.number), shape), axis=2)
    return msgspec.structs.replace(sample, routes=experts[..., : router.shape.chosen].astype("|i1"))


def on_two_ranks(model: Path, folder: Path) -> dict[str, list[Steps]]:
    """`steps` of both ranks, however they divide the work."""
    on_ranks(2, _work, free_port(), model, folder)
    of_rank = [torch.load(folder / f"steps-{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: [results[name] for results in of_rank] for name in TWO_RANKS}


def _work(rank: int, port: int, model: Path, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    join(Rank(rank, 2, rank), f"127.0.0.1:{port}", "cpu")
    results = {
        name: steps(Meshes.of(degrees, "cpu"), model, capacity=128) for name, degrees in TWO_RANKS.items()
    }
    torch.save(results, folder / f"steps-{rank}.pt")
    dist.barrier()
    leave()
