"""Optimizer steps of a small sharded model with given gradients, on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from loopback import free_port
from rank_processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stackrl.runtime.trainer import checkpoint
from stackrl.runtime.trainer.optimizer import clip, global_norm, make_optimizer
from stackrl.runtime.trainer.protocol import Progress
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.schemas import optimizers
from stackrl.schemas.optimizers import Optimizer

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": optimizers.AdamW(learning_rate=0.01, epsilon=1e-6, weight_decay=0.1),
    "muon": optimizers.Muon(type="muon", learning_rate=0.01, epsilon=1e-6),
    "muon, plain": optimizers.Muon(type="muon", learning_rate=0.01, epsilon=1e-6, nesterov=False),
    "sgd": optimizers.SGD(type="sgd", learning_rate=0.1, nesterov=True, weight_decay=0.1),
    "sgd, plain": optimizers.SGD(type="sgd", learning_rate=0.1, momentum=0.0),
    "signsgd": optimizers.SignSGD(type="signsgd", learning_rate=0.01, weight_decay=0.1),
}
RATE = 0.5
"""Of the optimizer's own, at each step."""
Weights = dict[str, Tensor]


class Experts(nn.Module):
    """A stack of three matrices: two ranks hold different numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 10, 6))


class Net(nn.Module):
    """Something of each kind; five rows do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.standing = nn.Linear(6, 9)
        self.lying = nn.Linear(9, 5, bias=False)
        self.whole_experts = Experts()
        self.cut_experts = Experts()
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)


def net(mesh: DeviceMesh | None = None) -> Net:
    """The same weights each time, over the ranks of ``mesh``."""
    torch.manual_seed(0)
    model = Net()
    if mesh is not None:
        fully_shard(model.cut_experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, settings: Optimizer) -> None:
    """Step ``number``, whose gradient is the same however the model is sharded."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    clip(model.parameters(), global_norm(model.parameters()), 3.0)
    for group in optimizer.param_groups:
        group["lr"] = RATE * settings.learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def weights(model: nn.Module) -> Weights:
    """Whole."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def trained(mesh: DeviceMesh | None, settings: Optimizer, folder: Path | None = None) -> Weights:
    """Weights after four steps; what two of them made is left in ``folder``."""
    model = net(mesh)
    optimizer = make_optimizer(model, settings)
    for number in range(4):
        if number == 2 and folder is not None:
            saver = checkpoint.Saver("cpu")
            state = checkpoint.state_of(model, optimizer)
            saver.begin(folder, state, Progress(index=2), {}, lambda: None)
            saver.settle()
        step(model, optimizer, number, settings)
    return weights(model)


def resumed(mesh: DeviceMesh, settings: Optimizer, folder: Path) -> Weights:
    """As `trained`, from what is in ``folder`` on."""
    model = net(mesh)
    optimizer = make_optimizer(model, settings)
    checkpoint.load(folder, model, optimizer)
    for number in (2, 3):
        step(model, optimizer, number, settings)
    return weights(model)


def differences(one: Weights, other: Weights) -> dict[str, float]:
    """Norm of the difference over the norm, of each tensor."""
    assert one.keys() == other.keys()
    return {name: float((one[name] - other[name]).norm() / one[name].norm()) for name in one}


def on_two_ranks(saved: Path, save: Path) -> tuple[dict[str, Weights], dict[str, Weights]]:
    """Of each optimizer `trained`, which leaves checkpoints below ``save``, and `resumed` from ``saved``."""
    file = save / "weights.pt"
    on_ranks(2, _work, free_port(), saved, save, file)
    return torch.load(file)


def _work(rank: int, port: int, saved: Path, save: Path, file: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    mesh = join(Rank(rank, 2, rank), f"127.0.0.1:{port}", "cpu").dense
    results = (
        {name: trained(mesh, settings, save / name) for name, settings in OPTIMIZERS.items()},
        {name: resumed(mesh, settings, saved / name) for name, settings in OPTIMIZERS.items()},
    )
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    leave()
