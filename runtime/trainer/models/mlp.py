"""The gated MLP, and a mixture of many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from stackrl.runtime.trainer.models import shape as shapes
from stackrl.runtime.trainer.models.emulation import emulated

if TYPE_CHECKING:
    from stackrl.runtime.trainer.expert_parallel import Exchange


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: shapes.Mlp, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=shape.bias)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=shape.bias)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=shape.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(states), self.up_proj(states)))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up, of which the backward pass finds the two alone, not SiLU(gate)."""
    return _Gated.apply(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        gate, up = ctx.saved_tensors
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        return gate_gradient, F.silu(gate).mul_(gradient)


class Mixture(nn.Module):
    """Each token goes through the few experts that the router chooses, and the shared one if there is one."""

    def __init__(self, shape: shapes.Experts, hidden: int) -> None:
        super().__init__()
        self.gate = Router(shape, hidden)
        self.experts = Experts(shape, hidden)
        self.exchange: Exchange | None = None
        """Where other ranks hold some of the experts: the way to them."""
        self.shared_experts = Mlp(shapes.Mlp(shape.shared), hidden) if shape.shared else None

    def forward(self, states: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        weights, chosen = self.gate(states)
        mixed = (self.dispatch(states, chosen) * weights[..., None]).sum(1).to(states.dtype)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(states)

    def dispatch(self, states: Tensor, chosen: Tensor) -> Tensor:
        """What each token's experts make of it: ``states`` [T, H], ``chosen`` int64 [T, k] → [T, k, H]."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.gate.number)
        rows = states.index_select(0, order // chosen.shape[1])
        if self.exchange is None:
            results = self.experts(rows, counts)
        else:
            results = self.exchange.through(self.experts, rows, counts)
        return results.index_select(0, order.argsort()).unflatten(0, chosen.shape)


@dataclass
class Traffic:
    """What a router is given, and what is seen of it, while one micro-batch of T tokens passes.

    What is seen is set, not added up: a layer that is computed again in the backward pass says it again.
    """

    counted: Tensor
    """bool [T]: tokens that are looked at; the others are padding."""
    given: Tensor | None = None
    """int8 or int16 [T, k]: experts to take in place of the router's choice, which stands where one is -1."""
    load: Tensor | None = None
    """int64 [E]: how many of the tokens went through each expert."""
    confidence: Tensor | None = None
    """float64 []: sum over the tokens of the share that their experts have of all scores."""

    def replayed(self, chosen: Tensor) -> Tensor:
        """``chosen`` int64 [T, k] with the experts that are given."""
        if self.given is None:
            return chosen
        return torch.where((self.given < 0).any(1, keepdim=True), chosen, self.given.long())

    def note(self, scores: Tensor, chosen: Tensor) -> None:
        """Look at ``scores`` float32 [T, E] and at the experts ``chosen`` by them, or given."""
        tokens = self.counted[:, None].expand_as(chosen).flatten().long()
        self.load = tokens.new_zeros(scores.shape[1]).scatter_add_(0, chosen.flatten(), tokens)
        shares = scores.gather(1, chosen).sum(1) / scores.sum(1)
        self.confidence = shares.where(self.counted, 0).sum(dtype=torch.float64)


class Router(nn.Module):
    """Which experts a token goes through, and how much each of them counts."""

    def __init__(self, shape: shapes.Experts, hidden: int) -> None:
        super().__init__()
        self.shape, self.number = shape, shape.number
        self.weight = nn.Parameter(torch.empty(shape.number, hidden))
        # float32 whatever the model's type: rounded, it would choose other experts than the engine does
        bias = torch.zeros(shape.number, dtype=torch.float32) if shape.corrected else None
        self.register_buffer("e_score_correction_bias", bias)
        self.traffic: Traffic | None = None
        """Of the micro-batch that passes; set from outside, where it is looked at."""

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] → weights float32 [T, k] and experts int64 [T, k]."""
        if self.shape.score == "softmax":
            scores = F.linear(states, self.weight).float().softmax(-1)
        else:
            scores = F.linear(states.float(), self.weight.float()).sigmoid()
        chosen = self.choose(scores.detach())
        if self.traffic is not None:
            chosen = self.traffic.replayed(chosen)
            self.traffic.note(scores.detach(), chosen)
        weights = scores.gather(1, chosen)
        if self.shape.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.shape.score == "softmax":
            weights = weights.to(states.dtype).float()
        return weights * self.shape.scale, chosen

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token by its ``scores`` [T, E], int64 [T, k]."""
        if self.shape.corrected:
            scores = scores + self.e_score_correction_bias
        if self.shape.groups > 1:
            grouped = scores.unflatten(1, (self.shape.groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(self.shape.groups_chosen).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return scores.topk(self.shape.chosen, sorted=False).indices


class Experts(nn.Module):
    """The matrices of all experts, stacked."""

    def __init__(self, shape: shapes.Experts, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.number, 2 * shape.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.number, hidden, shape.intermediate))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """``rows`` [N, H], those of the first expert first; ``counts`` int64 [E], which sum to N → [N, H]."""
        gate, up = self.through("gate_up_proj", rows, counts).chunk(2, dim=-1)
        return self.through("down_proj", gated(gate, up), counts)

    def through(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """``rows`` [N, in] through the matrices ``name`` of their experts → [N, out]."""
        return product(rows, getattr(self, name), counts)


def product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_product` where that can be, else expert by expert."""
    matrices = matrices.to_local() if isinstance(matrices, DTensor) else matrices
    if emulated(rows.device.type, rows.dtype):
        return product(rows.float(), matrices.float(), counts).to(rows.dtype)
    return (grouped_product if groupable(matrices) else looped_product)(rows, matrices, counts)


def groupable(*matrices: Tensor) -> bool:
    """Whether torch's grouped product takes them: it wants rows of a multiple of 16 bytes, both ways."""
    return all(size * matrix.element_size() % 16 == 0 for matrix in matrices for size in matrix.shape[1:])


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows of each expert times its matrix transposed, in one kernel.

    ``rows`` [N, in], ``matrices`` [E, out, in], ``counts`` int64 [E] → [N, out]. Counts must sum to N: what
    rows beyond them would hold is undefined.
    """
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))


def looped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_product`, expert by expert."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, matrices.unbind(), strict=True)])
