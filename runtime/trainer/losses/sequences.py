"""Sums and means over whole sequences, for losses that look at more than one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stackrl.runtime.trainer.context import Context


@dataclass(frozen=True)
class Sequences:
    """Which of D sequences each of N trained tokens belongs to. A sequence lies whole in one micro-batch, but
    where ranks share it, each has some of its tokens; value and gradient are those of all."""

    of: Tensor
    """int64 [N]"""
    lengths: Tensor
    """int64 [D]: trained tokens of each, those of other ranks among them."""
    context: Context = Context()  # noqa: RUF009

    @classmethod
    def one(cls, tokens: int) -> Sequences:
        """A single sequence of so many trained tokens."""
        return cls(torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens]))

    def sum(self, values: Tensor) -> Tensor:
        """Of ``values`` [N], over the sequence that each token belongs to: [N]."""
        sums = torch.zeros(len(self.lengths), dtype=torch.float64, device=values.device)
        sums = sums.index_add(0, self.of, values.double())
        if self.context.ranks > 1:
            sums = _SumOverRanks.apply(sums, self.context.group)
        return sums.index_select(0, self.of).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Of ``values`` [N], over the trained tokens of the sequence that each token belongs to: [N]."""
        return self.sum(values) / self.lengths.index_select(0, self.of)


class _SumOverRanks(torch.autograd.Function):
    """Every rank's loss depends on every rank's part, so gradients are summed as well."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _summed(gradient, ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values
