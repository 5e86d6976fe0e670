"""The language-model head: logprob and entropy of chosen tokens, never tokens × vocabulary.

Logits are made for a chunk of tokens at a time, forward and again backward, so that the memory is
chunk × vocabulary whatever the length of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], weight, temperatures[part])
            normalizers[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizers[part]
            probabilities = (logits - normalizers[part, None]).exp()
            entropies[part] = normalizers[part] - (probabilities * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperatures, normalizers)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor):
        """With p the distribution, ∂ logprob / ∂ logits = (onehot(target) − p) / temperature."""
        hidden, weight, targets, temperatures, normalizers = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=_wide(weight.dtype))
        for part in _chunks(len(hidden), ctx.chunk):
            logits = _logits(hidden[part], weight, temperatures[part])
            scale = (gradient[part] / temperatures[part])[:, None]
            logits_gradient = (logits - normalizers[part, None]).exp_().mul_(-scale)
            logits_gradient.scatter_add_(-1, targets[part, None], scale)
            logits_gradient = logits_gradient.to(hidden.dtype)
            torch.mm(logits_gradient, weight, out=hidden_gradient[part])
            weight_gradient += logits_gradient.T @ hidden[part]
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """[n, V], the product in the model's type as in the engine, the rest in float32 or wider."""
    logits = hidden @ weight.T
    return logits.to(_wide(logits.dtype)) / temperatures[:, None]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
