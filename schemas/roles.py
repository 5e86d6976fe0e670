"""`roles:` how the machines are split over trainer and engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from stackrl.schemas.base import Model, Size

Pool = Literal["inference", "prefill", "decode"]
"""A key under `roles:` that names engines."""

Count = Annotated[int, Field(ge=1)]

Resources = Annotated[dict[str, JsonValue], Field(min_length=1, examples=["{accelerators: 'B200:8'}"])]
"""SkyPilot's own words, checked against its schema (schemas/rules_of_hardware.py)."""


class TrainerRole(Model):
    """What the trainer gets. Exactly one of nodes, gpus and processes."""

    nodes: Count | None = None
    """Whole nodes."""
    gpus: Count | None = None
    """GPUs of the one node."""
    processes: Count | None = None
    """Processes, on a machine without GPUs."""
    resources: Resources | None = None
    """Machines of its own kind: words of SkyPilot's `resources`, laid over the task's. Goes with nodes."""


class EngineRole(Model):
    """What a pool of engines gets. Exactly one of nodes, gpus, processes and share."""

    nodes: Count | Literal["rest"] | None = None
    """Whole nodes, or `rest`: the nodes that no other role takes."""
    gpus: Count | Literal["rest"] | None = None
    """GPUs of the one node."""
    processes: Count | None = None
    """Engines, on a machine without GPUs."""
    resources: Resources | None = None
    """Machines of its own kind: words of SkyPilot's `resources`, laid over the task's. Goes with nodes."""
    share: Literal["trainer"] | None = None
    """Run on the trainer's own GPU."""
    engine_memory: Size | None = None
    """With `share`: how much of the GPU's memory the engine takes."""
    tensor_parallel: Count | None = None
    """GPUs that a copy of the model is divided over, in this pool; by default `inference.tensor_parallel`."""
    data_parallel: Count = 1
    """Copies of the model in one engine of this pool, which share its address."""
    expert_parallel: bool = False
    """Whole experts on each of the engine's GPUs, not a part of each expert."""
    arguments: dict[str, JsonValue] = {}
    """Further arguments of vLLM's server in this pool, laid over `inference.arguments`."""


class Roles(Model):
    """The split. It adds up to `num_nodes`, or, on one node, to its GPUs.

    Roles with `resources` of their own make a run on mixed hardware.
    """

    trainer: TrainerRole
    inference: EngineRole | None = None
    """One pool of engines that do prefill and decode."""
    prefill: EngineRole | None = None
    """Engines that only prefill; goes with `decode`."""
    decode: EngineRole | None = None
    """Engines that only decode; goes with `prefill`."""
