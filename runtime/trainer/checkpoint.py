"""The trainer's part of a checkpoint: weights and optimizer state, sharded, and how far training has come.

The format is torch's distributed checkpoint: any number of ranks can load what any other number wrote.
runtime/checkpoints.py says when a checkpoint as a whole counts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stackrl.runtime.run import write_durably

PART = "trainer"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far training has come."""

    index: int = 0
    """The next optimizer step of the run."""
    step: int = 0
    """RL optimizer steps behind the weights."""
    stage: str = ""
    """The stage that the optimizer state belongs to; empty before the first."""


def save(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the trainer's part of ``checkpoint``. All ranks call it together.

    When it returns, everything is on disk.
    """
    part = checkpoint / PART
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # an unfinished attempt's
        part.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(model, optimizer), checkpoint_id=part)
    if dist.get_rank() == 0:
        write_durably(part / PROGRESS, json.dumps(asdict(progress)).encode())
    dist.barrier()


def stored_progress(checkpoint: Path) -> Progress:
    """How far training had come when ``checkpoint`` was made."""
    return Progress(**json.loads((checkpoint / PART / PROGRESS).read_bytes()))


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, optimizer and random state. All ranks, however many, call it together."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint / PART)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["random"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "random": torch.get_rng_state()}
