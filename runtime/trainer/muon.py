"""Muon: steps along orthogonalised momentum, with AdamW for the parameters that it is not for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic a·x + b·x³ + c·x⁵, which pulls singular values in (0, 1] to about 0.7 … 1.2 in five
rounds (https://kellerjordan.github.io/posts/muon)."""
SMALLEST_NORM = 1e-7
"""Of a gradient that is zero: it is divided by this."""
SIZE_OF_ADAMW = 0.2
"""Root mean square of AdamW's usual steps, as measured in arXiv 2502.16982, section 2.2."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices [m, n] and stacks of them [E, m, n], AdamW for the rest, with one rate η for both.

    With g the gradient, β the momentum and λ the weight decay, for each matrix (arXiv 2502.16982, eq. 4, with
    the running mean and Nesterov's step of https://github.com/KellerJordan/Muon):

        M ← βM + (1 − β)g
        O = orthogonalised((1 − β)g + βM), or orthogonalised(M) without Nesterov
        θ ← θ − η·(0.2·√max(m, n)·O + λθ)

    Matrices may be sharded in any way: what a rank's step needs of them is gathered from the others, so all
    ranks have to step together.
    """

    def __init__(
        self,
        matrices: Iterable[dict[str, Any]],
        others: Iterable[dict[str, Any]],
        rate: float,
    ) -> None:
        """Groups of parameters: ``matrices`` with `weight_decay`, `momentum`, `nesterov` and `iterations`,
        ``others`` with `weight_decay`, `betas` and `eps`.
        """
        groups = [group | {"orthogonal": True} for group in matrices]
        groups += [group | {"orthogonal": False, "fused": True} for group in others]
        super().__init__(groups, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """``closure`` is part of torch's interface; gradients are there already."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["orthogonal"]:
                for matrix in trained:
                    self._step_matrix(matrix, group)
            else:
                self._step_others(trained, group)

    def _step_matrix(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        state, kept, rate = self.state[matrix], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - kept)
        ahead = matrix.grad.lerp(momentum, kept) if group["nesterov"] else momentum
        size = SIZE_OF_ADAMW * max(matrix.shape[-2:]) ** 0.5
        matrix.mul_(1 - rate * group["weight_decay"])
        matrix.add_(_orthogonalised_shards(ahead, group["iterations"]), alpha=-rate * size)

    def _step_others(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """As torch.optim.AdamW, with state of the same names."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Newton–Schulz towards UVᵀ of each matrix USVᵀ in ``matrices`` [..., m, n], in their dtype.

    X ← aX + (bA + cA²)X with A = XXᵀ, from X = G/‖G‖, of the lying one of G and Gᵀ. bfloat16 is exact enough
    and is computed in on GPUs; CPUs, to which it is foreign, take float32.
    """
    a, b, c = COEFFICIENTS
    standing = matrices.shape[-2] > matrices.shape[-1]
    states = matrices.mT if standing else matrices
    states = states / states.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    if states.is_cuda:
        states = states.bfloat16()
    for _ in range(iterations):
        gram = states @ states.mT
        states = a * states + (b * gram + c * (gram @ gram)) @ states
    return (states.mT if standing else states).to(matrices.dtype)


def _orthogonalised_shards(matrices: Tensor, iterations: int) -> Tensor:
    """`orthogonalised` where ``matrices`` may be sharded, and the result is sharded as they are.

    Shards of a stack that hold whole matrices stay where they are. Matrices that are cut are gathered, and
    every rank orthogonalises them for itself.
    """
    if not isinstance(matrices, DTensor):
        return orthogonalised(matrices, iterations)
    stacked = matrices.ndim - 2
    whole = [Replicate() if _cuts(placement, stacked) else placement for placement in matrices.placements]
    gathered = matrices.redistribute(placements=whole)
    return DTensor.from_local(
        orthogonalised(gathered.to_local(), iterations),
        matrices.device_mesh,
        whole,
        run_check=False,
        shape=matrices.shape,
        stride=matrices.stride(),
    ).redistribute(placements=matrices.placements)


def _cuts(placement: Placement, stacked: int) -> bool:
    """Whether ``placement`` divides one of the dimensions after the first ``stacked``."""
    return not isinstance(placement, Replicate) and placement.dim >= stacked
