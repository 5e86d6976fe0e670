"""SignSGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class SignSGD(torch.optim.Optimizer):
    """θ ← θ − η·(sign g + λθ): signSGD (arXiv 1802.04434, algorithm 1) with decoupled weight decay λ.

    It has no state, and as each weight is for itself, a rank steps its shards alone.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], rate: float) -> None:
        """``groups``: `params` and `weight_decay` of each."""
        super().__init__(groups, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """``closure`` is part of torch's interface; gradients are there already."""
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - rate * decay).add_(parameter.grad.sign(), alpha=-rate)
