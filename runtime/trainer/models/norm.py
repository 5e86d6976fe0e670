"""The norm of all families."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), computed in float32 and rounded before the weight, as the engines do."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, states: Tensor) -> Tensor:
        return _Norm.apply(states, self.weight, self.epsilon)


class _Norm(torch.autograd.Function):
    """Keeps what it is given for the backward pass, and nothing of what it makes on the way in float32."""

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        return weight * (wide * scale).to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        """With n = s·x and g the gradient of n: ∂x = s·(g − n·mean(g·n)), as s is 1 / √(mean x² + ε)."""
        states, weight, scale = ctx.saved_tensors
        normalized = states.float() * scale
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = (gradient * normalized.to(states.dtype)).flatten(0, -2).sum(0)
        wide = (gradient * weight).float()
        share = (wide * normalized).mean(-1, keepdim=True)
        states_gradient = wide.sub_(normalized.mul_(share)).mul_(scale)
        return states_gradient.to(states.dtype), weight_gradient, None
