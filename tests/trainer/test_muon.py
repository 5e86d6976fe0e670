"""Muon against torch's own for single matrices, and against float64 by hand for stacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stackrl.runtime.trainer.muon import Muon, orthogonalised
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.schemas import optimizers

torch.set_num_threads(1)


def by_hand(matrix: np.ndarray, rounds: int = 5) -> np.ndarray:
    """The iteration of the Muon post, in float64, through the singular values alone."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((matrix**2).sum())
    for _ in range(rounds):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


def difference(ours: Tensor, expected: np.ndarray) -> float:
    """Norm of the difference over the norm."""
    return float(np.linalg.norm(ours.numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)], ids=str)
def test_matrices_are_orthogonalised_as_by_hand(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert difference(orthogonalised(matrix, 5), by_hand(matrix.double().numpy())) <= 1e-5


@pytest.mark.parametrize("shape", [(3, 6, 6), (4, 5, 8), (4, 8, 5), (2, 3, 4, 6)], ids=str)
def test_each_matrix_of_a_stack_is_orthogonalised_for_itself(shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    stack *= torch.logspace(-4, 4, shape[0]).view(-1, *[1] * (stack.ndim - 1))
    expected = np.stack([by_hand(m) for m in stack.double().flatten(0, -3).numpy()]).reshape(shape)
    assert difference(orthogonalised(stack, 5), expected) <= 1e-5


def test_a_matrix_of_a_stack_without_a_gradient_stays_zero() -> None:
    """An expert that no token went to."""
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    stack[1] = 0
    result = orthogonalised(stack, 5)
    assert torch.isfinite(result).all() and not result[1].any() and result[0].any()


def test_singular_values_come_near_to_one() -> None:
    matrix = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
    before, after = (torch.linalg.svdvals(m) for m in (matrix, orthogonalised(matrix, 5)))
    assert before.max() / before.median() > 1.7
    assert 0.6 < after.median() < 1.25 and after.max() < 1.25


@pytest.mark.parametrize("nesterov", [True, False])
def test_single_matrices_step_as_torchs_muon(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which orthogonalises in bfloat16; held to float32 here, so that the comparison is a close one."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    torch.manual_seed(5)
    starts = [torch.randn(shape) for shape in ((6, 6), (4, 9), (9, 4))]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    own = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "iterations": 4}
    optimizer = Muon([{"params": ours} | own], [], rate=0.02)
    reference = torch.optim.Muon(
        theirs,
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b, start in zip(ours, theirs, starts, strict=True):
        moved = (b - start).detach()
        assert float((a - b).detach().norm() / moved.norm()) <= 1e-5


def test_a_stack_steps_as_its_matrices_alone() -> None:
    torch.manual_seed(6)
    start, gradients = torch.randn(3, 5, 8), torch.randn(4, 3, 5, 8)
    stack = nn.Parameter(start.clone())
    alone = [nn.Parameter(matrix.clone()) for matrix in start]
    own = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "iterations": 5}
    together = Muon([{"params": [stack]} | own], [], rate=0.1)
    apart = Muon([{"params": alone} | own], [], rate=0.1)
    for gradient in gradients:
        stack.grad = gradient.clone()
        for matrix, part in zip(alone, gradient, strict=True):
            matrix.grad = part.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stack.detach(), torch.stack([m.detach() for m in alone]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed_tokens = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)


SETTINGS = optimizers.Muon(type="muon", learning_rate=0.05, betas=(0.8, 0.9), epsilon=1e-6)


def test_what_lies_between_hidden_states_is_muons_and_the_rest_adamws() -> None:
    net = Net()
    optimizer = make_optimizer(net, SETTINGS)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    muons = {
        names[id(parameter)]
        for group in optimizer.param_groups
        if group["orthogonal"]
        for parameter in group["params"]
    }
    assert muons == {"layer.weight", "experts"}
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(names[id(parameter)] for parameter in everything) == sorted(names.values())


def test_the_rest_steps_as_torchs_adamw() -> None:
    ours, theirs = Net(), Net()
    optimizer = make_optimizer(ours, SETTINGS)
    matrices = [theirs.embed_tokens.weight, theirs.lm_head.weight]
    vectors = [theirs.layer.bias, theirs.norm.weight, theirs.norm.bias]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.05,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for _ in range(4):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    named = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if name not in ("layer.weight", "experts"):
            torch.testing.assert_close(named[name], parameter, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_left_out() -> None:
    net = Net()
    net.layer.weight.requires_grad_(False)
    optimizer = make_optimizer(net, SETTINGS)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert id(net.layer.weight) not in stepped and len(stepped) == 6
