"""Optimizer steps of small models under any division of the work, for tests that compare them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
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
from stackrl.runtime.trainer.validation import validate
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.optimizers import AdamW, Optimizer
from stackrl.schemas.trainer import Trainer

STEPS = 3
ADAMW = AdamW(learning_rate=1e-3, epsilon=1e-6, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """Three steps: of which model, how trained, and how the ranks divide the work."""

    model: Path
    degrees: Degrees = Degrees(1)  # noqa: RUF009
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = ADAMW
    capacity: int = 4096
    samples: int = 12
    save: Path | None = None
    """Where a checkpoint is left before the last step."""
    resume: Path | None = None
    """Such a checkpoint, which the last step alone is taken from."""

    def __str__(self) -> str:
        parts = vars(self.degrees).items()
        return f"{self.model.name} " + " ".join(f"{name}={value}" for name, value in parts if value > 1)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    logprobs: list[Tensor]
    """Of the first rank's batches."""
    weights: dict[str, Tensor]
    """After the last step."""
    held_out: float
    """The validation loss on the last batch then."""

    def furthest(self, other: Outcome) -> tuple[float, str]:
        """The largest difference, over what it is a difference of, and where it is."""
        pairs = {f"loss {i}": (a, b) for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True))}
        pairs |= {f"norm {i}": (a, b) for i, (a, b) in enumerate(zip(self.norms, other.norms, strict=True))}
        pairs["validation"] = self.held_out, other.held_out
        differences = {name: abs(a - b) / abs(a) for name, (a, b) in pairs.items()}
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            differences[name] = float((weight - other.weights[name]).norm() / weight.norm().clamp(min=1e-9))
        return max((difference, name) for name, difference in differences.items())


def outcome(meshes: Meshes, case: Case) -> Outcome:
    """What ``case`` gives; all ranks call it together."""
    decoder = build(case.model, Trainer(head_chunk=32, **case.trainer), "float32", meshes, seed=7)
    optimizer = make_optimizer(decoder, case.optimizer)
    steps = []
    if case.resume:
        checkpoint.load(case.resume, decoder, optimizer)
    for number in range(STEPS - 1 if case.resume else 0, STEPS):
        if case.save and number == STEPS - 1:
            saver = checkpoint.Saver("cpu")
            saver.begin(
                case.save, checkpoint.state_of(decoder, optimizer), Progress(index=number), {}, lambda: None
            )
            saver.settle()
        batches = make_batches(
            [with_pull(sample) for sample in make_samples(case.samples, seed=number)],
            dist.get_world_size(),
            case.capacity,
            context=case.degrees.context,
            index=number,
            report=True,
        )
        batch = batches[dist.get_rank()]
        steps.append(
            train_step(decoder, optimizer, batch, OBJECTIVES["grpo, sequence"], rate=1e-3, limit=0.5)
        )
    return Outcome(
        [step.metrics["loss"] for step in steps],
        [step.metrics["gradient_norm"] for step in steps],
        [torch.from_numpy(step.logprobs) for step in steps],
        {name: tensor.clone() for name, tensor in gathered(decoder, torch.float32)},
        validate(decoder, batch.micro_batches)["validation_loss"],
    )


def with_pull(sample: Sample) -> Sample:
    """Advantages of one sign: a loss whose parts cancel out would be mostly rounding."""
    return msgspec.structs.replace(sample, advantage=abs(sample.advantage) + 0.1)


def outcomes(ranks: int, cases: list[Case], folder: Path) -> list[Outcome]:
    """What each case gives on ``ranks`` processes, as rank 0 sees it."""
    file = folder / f"outcomes-{ranks}.pt"
    on_ranks(ranks, _work, ranks, free_port(), cases, file)
    return torch.load(file, weights_only=False)


def _work(rank: int, ranks: int, port: int, cases: list[Case], file: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    join(Rank(rank, ranks, rank), f"127.0.0.1:{port}", "cpu")
    results = [outcome(Meshes.of(case.degrees, "cpu"), case) for case in cases]
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    leave()
