"""The language-model head: logprob and entropy of chosen tokens, never tokens × vocabulary.

Logits are made for a chunk of tokens at a time, forward and again backward (but for the last chunk), so that
the memory is chunk × vocabulary whatever the length of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from stackrl.runtime.trainer.models.emulation import emulated

AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits whose softmax is computed at a time."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution softmax(hidden · weightᵀ / temperature).

    ``hidden`` [N, H], ``weight`` [V, H], ``targets`` int64 [N], ``temperatures`` [N] → two [N], in float32 or
    wider. Gradients reach ``hidden`` and ``weight`` through the logprob; the entropy is a metric without any.
    """
    return _Head.apply(hidden, weight, targets, temperatures, chunk)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int):
        logprobs, entropies, normalizers = (
            torch.empty(len(hidden), dtype=_wide(hidden.dtype), device=hidden.device) for _ in range(3)
        )
        chunks = _chunks(len(hidden), chunk)
        memory = hidden.new_empty(max((part.stop - part.start for part in chunks), default=0), len(weight))
        for part in chunks:
            logits = memory[: part.stop - part.start]
            _multiply(hidden[part], weight.T, logits)
            for rows, scores in _scores(logits, part, temperatures):
                largest = scores.amax(-1, keepdim=True)
                scores -= largest
                target = scores.gather(-1, targets[rows, None]).squeeze(-1)
                shares = scores.exp()
                sums = shares.sum(-1)
                logprobs[rows] = target - sums.log()
                entropies[rows] = sums.log() - torch.linalg.vecdot(shares, scores) / sums
                normalizers[rows] = largest.squeeze(-1) + sums.log()
        # the backward pass begins with the last chunk, whose logits are in the memory that it needs anyhow
        ctx.save_for_backward(hidden, weight, targets, temperatures, normalizers, memory)
        ctx.chunks = chunks
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor):
        """With p the distribution, ∂ logprob / ∂ logits = (onehot(target) − p) / temperature."""
        hidden, weight, targets, temperatures, normalizers, memory = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = None
        if ctx.needs_input_grad[1]:  # beside adapters it is frozen
            make = torch.empty_like if ctx.chunks else torch.zeros_like
            weight_gradient = make(weight, dtype=_wide(weight.dtype))
        for part in reversed(ctx.chunks):
            logits = memory[: part.stop - part.start]
            if part.stop < len(hidden):
                _multiply(hidden[part], weight.T, logits)
            for rows, scores in _scores(logits, part, temperatures):
                scale = (gradient[rows] / temperatures[rows])[:, None]
                scores.sub_(normalizers[rows, None]).exp_().mul_(-scale)
                scores.scatter_add_(-1, targets[rows, None], scale)
                logits[rows.start - part.start : rows.stop - part.start] = scores
            _multiply(logits, weight, hidden_gradient[part])
            if weight_gradient is not None:
                _add_product(logits.T, hidden[part], weight_gradient, first=part is ctx.chunks[-1])
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _scores(logits: Tensor, part: slice, temperatures: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows [n, V] of ``logits`` at a time, as a copy divided by their temperatures, in float32 or wider.

    So few that they stay in the processor's cache. Rows are counted as in ``temperatures``, of which
    ``logits`` are ``part``.
    """
    size = max(1, AT_ONCE[logits.device.type] // logits.shape[1])
    for start in range(0, len(logits), size):
        some = logits[start : start + size]
        rows = slice(part.start + start, part.start + start + len(some))
        yield rows, some.to(_wide(some.dtype)) / temperatures[rows, None]


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left`` @ ``right``, into ``out``."""
    if emulated(out.device.type, out.dtype):
        out.copy_(left.float() @ right.float())
    else:
        torch.mm(left, right, out=out)


def _add_product(left: Tensor, right: Tensor, total: Tensor, *, first: bool) -> None:
    """Add ``left`` @ ``right`` to ``total``, which may be wider, and has no value yet at the ``first``."""
    if emulated(left.device.type, left.dtype):
        left, right = left.float(), right.float()
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(length: int, size: int) -> list[slice]:
    """As few as there can be of at most ``size``, and of about the same size."""
    count = -(-length // size)
    bounds = [length * number // count for number in range(count + 1)] if count else []
    return [slice(start, stop) for start, stop in pairwise(bounds)]
