"""Gradients of one step on any number of ranks, for tests that compare them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loopback import free_port
from rank_processes import on_ranks
from torch import Tensor
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer import losses
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import global_norm
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.reference import make_reference
from stackrl.runtime.trainer.step import Objective, accumulate
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.losses import AipoLoss, Divergence, GrpoLoss, GspoLoss
from stackrl.schemas.trainer import Trainer

MAX_TOKENS = 16
OBJECTIVES = {
    "aipo, token": Objective(losses.make(AipoLoss(ratio_cap=2.0)), "token", MAX_TOKENS),
    "grpo, sequence": Objective(losses.make(GrpoLoss(type="grpo")), "sequence", MAX_TOKENS),
    "aipo, constant": Objective(losses.make(AipoLoss()), "constant", MAX_TOKENS),
    "supervised": Objective(losses.supervised, "token", MAX_TOKENS),
}
REFERRING = {
    "gspo, kl": Objective(
        losses.make(GspoLoss(type="gspo", clip_low=0.5, clip_high=2.0, kl=Divergence(coefficient=0.1))),
        "sequence",
        MAX_TOKENS,
        refers=True,
    )
}


@dataclass(frozen=True)
class Case:
    """One step: of which model, with which samples, how they are packed, what is minimised."""

    model: Path
    objective: str
    samples: int = 24
    capacity: int = 4096
    recompute: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    """Other settings of `trainer:`."""
    reference: Path | None = None
    """The weights that the trainer keeps, for objectives of REFERRING."""


@dataclass(frozen=True)
class Outcome:
    """The loss and the whole gradient of a step."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]

    def differences(self, other: Outcome) -> dict[str, float]:
        """Norm of the difference over the norm, of the loss and of each tensor."""
        assert self.gradients.keys() == other.gradients.keys()
        tensors = {
            name: float((gradient - other.gradients[name]).norm() / gradient.norm())
            for name, gradient in self.gradients.items()
        }
        return {
            "loss": abs(self.loss - other.loss) / abs(self.loss),
            "norm": abs(self.norm - other.norm) / self.norm,
            **tensors,
        }


def outcome(meshes: Meshes, case: Case, samples: list[Sample] | None = None) -> Outcome:
    """What ``case`` gives on the ranks of ``meshes``; all call it together."""
    activations = "full" if case.recompute else "none"
    settings = {"activation_checkpointing": activations, "head_chunk": 32} | case.trainer
    decoder = build(case.model, Trainer(**settings), "float32", meshes)
    reference = None
    if case.reference:
        reference = make_reference(decoder, case.reference, Trainer(**settings), "float32", meshes)
    samples = samples or make_samples(case.samples, seed=5)
    batch = make_batches(samples, dist.get_world_size(), case.capacity)[dist.get_rank()]
    totals = accumulate(decoder, batch, (OBJECTIVES | REFERRING)[case.objective], reference)
    norm = global_norm(decoder.parameters())
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    gradients = {name: gradient.clone() for name, gradient in gathered(decoder, torch.float32)}
    return Outcome(totals.metrics()["loss"], norm, gradients)


def outcomes(ranks: int, cases: list[Case], folder: Path) -> list[Outcome]:
    """What each case gives on ``ranks`` processes, as rank 0 sees it."""
    file = folder / "outcomes.pt"
    on_ranks(ranks, _work, ranks, free_port(), cases, file)
    return torch.load(file, weights_only=False)


def _work(rank: int, ranks: int, port: int, cases: list[Case], file: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    meshes = join(Rank(rank, ranks, rank), f"127.0.0.1:{port}", "cpu")
    results = [outcome(meshes, case) for case in cases]
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    leave()
