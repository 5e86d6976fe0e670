"""The norm of all families."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), computed in float32 and rounded before the weight, as the engines do."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(states.dtype)
