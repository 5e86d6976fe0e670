"""Expert parallelism: each rank of a group holds some of a layer's experts, and tokens come to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from stackrl.runtime.trainer.exchange import all_to_all
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.mlp import Experts, Mixture
from stackrl.runtime.trainer.models.shape import ModelError


def share_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide the experts of each layer over the ranks of ``mesh``, which has one dimension.

    Raises ModelError where their number does not divide, or there are none.
    """
    mixtures = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, Mixture)]
    if not mixtures:
        raise ModelError("the model has no experts to share; leave trainer.parallel.expert out")
    for mixture in mixtures:
        if mixture.gate.number % mesh.size():
            raise ModelError(
                f"{mesh.size()} ranks cannot share {mixture.gate.number} experts evenly; set "
                "trainer.parallel.expert to a divisor of that"
            )
        for module in mixture.experts.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter.data, mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        mixture.exchange = Exchange(mesh.get_group())


def cut_beside(parameter: nn.Parameter, ranks: int) -> Shard:
    """The dimension in which FSDP cuts a stack of matrices over ``ranks``; the first one counts experts.

    Raises ModelError where none divides.
    """
    for dimension in (1, 2):
        if parameter.shape[dimension] % ranks == 0:
            return Shard(dimension)
    raise ModelError(
        f"matrices of experts of {list(parameter.shape[1:])} cannot be cut over {ranks} ranks; raise "
        "trainer.parallel.expert"
    )


@dataclass(frozen=True)
class Exchange:
    """The way of rows to the ranks that hold their experts, and back."""

    group: dist.ProcessGroup

    def through(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """As ``experts(rows, counts)`` with all of them: ``rows`` [N, H], ``counts`` int64 [E] → [N, H]."""
        ranks = dist.get_world_size(self.group)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.unflatten(0, (ranks, -1))  # of each rank, for each expert here
        send, receive = counts.unflatten(0, (ranks, -1)).sum(1).tolist(), arriving.sum(1).tolist()
        guests = all_to_all(rows, send, receive, self.group)
        # they come rank by rank, and the experts take them expert by expert
        expert_of = torch.arange(arriving.numel(), device=rows.device) % arriving.shape[1]
        order = expert_of.repeat_interleave(arriving.flatten()).argsort(stable=True)
        results = experts(guests.index_select(0, order), arriving.sum(0))
        return all_to_all(results.index_select(0, order.argsort()), receive, send, self.group)
