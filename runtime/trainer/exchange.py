"""Rows that change ranks, and gradients that take the way back: for expert and context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Give each rank of ``group`` its part of ``rows`` [sum of send, ...] → [sum of receive, ...].

    The first ``send[0]`` rows go to the group's rank 0 and so on; ``receive`` says how many come from each.
    All ranks of the group call it together, and again in the backward pass, whether they have rows or not.
    """
    return _AllToAll.apply(rows, list(send), list(receive), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (receive, send, group)
        return _exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _exchanged(gradient, *ctx.way_back), None, None, None


def _exchanged(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
