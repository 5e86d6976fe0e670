"""`roles:` how the machines are split over trainer and engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.base import Model, Size

Count = Annotated[int, Field(ge=1)]


class TrainerRole(Model):
    """What the trainer gets. Exactly one of the keys."""

    nodes: Count | None = None
    """Whole nodes."""
    gpus: Count | None = None
    """GPUs of the one node."""
    processes: Count | None = None
    """Processes, on a machine without GPUs."""


class EngineRole(Model):
    """What a pool of engines gets. Exactly one of nodes, gpus, processes and share."""

    nodes: Count | Literal["rest"] | None = None
    """Whole nodes, or `rest`: the nodes that no other role takes."""
    gpus: Count | Literal["rest"] | None = None
    """GPUs of the one node."""
    processes: Count | None = None
    """Engines, on a machine without GPUs."""
    share: Literal["trainer"] | None = None
    """Run on the trainer's own GPU."""
    engine_memory: Size | None = None
    """With `share`: how much of the GPU's memory the engine takes."""


class Roles(Model):
    """The split. It adds up to `num_nodes`, or, on one node, to its GPUs."""

    trainer: TrainerRole
    inference: EngineRole | None = None
    """One pool of engines that do prefill and decode."""
    prefill: EngineRole | None = None
    """Engines that only prefill; goes with `decode`."""
    decode: EngineRole | None = None
    """Engines that only decode; goes with `prefill`."""
