"""The trainer's ranks, arranged for each way in which they divide the work."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stackrl.runtime.trainer.context import Context
from stackrl.schemas.degrees import Degrees

REPLICATE, SHARD, BESIDE, EXPERT, DATA, CONTEXT = "replicate", "shard", "beside", "expert", "data", "context"


@dataclass(frozen=True)
class Meshes:
    """Ranks that share a micro-batch are neighbours, and so are those that share a layer's experts."""

    degrees: Degrees
    dense: DeviceMesh
    """What the model is sharded over; two dimensions, the copies first, where there are several."""
    expert: DeviceMesh | None
    """Ranks that share the experts of a layer. None: each rank computes all of them."""
    beside: DeviceMesh
    """Ranks that hold the same experts, which these are sharded over; two dimensions as ``dense``."""
    context: Context

    @property
    def device(self) -> str:
        return self.dense.device_type

    @classmethod
    def of(cls, degrees: Degrees, device: str) -> Meshes:
        """All ranks call it together, after they have met."""
        copies, copy = degrees.replicate, degrees.shard * degrees.context
        dense = init_device_mesh(device, (copies, copy), mesh_dim_names=(REPLICATE, SHARD))
        dense = dense if copies > 1 else dense[SHARD]
        expert, beside, context = None, dense, Context()
        if degrees.expert > 1:
            shape = (copies, copy // degrees.expert, degrees.expert)
            experts = init_device_mesh(device, shape, mesh_dim_names=(REPLICATE, BESIDE, EXPERT))
            expert, beside = experts[EXPERT], experts[REPLICATE, BESIDE] if copies > 1 else experts[BESIDE]
        if degrees.context > 1:
            shape = (degrees.ranks // degrees.context, degrees.context)
            sharing = init_device_mesh(device, shape, mesh_dim_names=(DATA, CONTEXT))[CONTEXT]
            context = Context(sharing.get_local_rank(), degrees.context, sharing.get_group())
        return cls(degrees, dense, expert, beside, context)
