from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stackrl.runtime.trainer.optimizer import clip, global_norm, make_optimizer
from stackrl.schemas.optimizers import SGD, AdamW, Optimizer, SignSGD

Arrays = list[np.ndarray]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_only_matrices_decay() -> None:
    net = model()
    optimizer = make_optimizer(net, AdamW(learning_rate=0.5, weight_decay=0.1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = list(net.parameters())
    assert torch.allclose(after[0], before[0] * (1 - 0.5 * 0.1))
    assert all(torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))


def test_one_step_equals_the_formula_of_adamw() -> None:
    net = model()
    settings = AdamW(learning_rate=0.1, betas=(0.8, 0.9), epsilon=1e-3, weight_decay=0.01)
    optimizer = make_optimizer(net, settings)
    weight = net[0].weight
    before, gradient = weight.detach().double().clone(), torch.randn(4, 4)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = gradient.clone()
    optimizer.step()
    # after one step the bias-corrected moments are the gradient and its square
    move = gradient.double() / (gradient.double().abs() + 1e-3)
    expected = before * (1 - 0.1 * 0.01) - 0.1 * move
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=1e-6)


def stepped(settings: Optimizer, steps: int = 4) -> tuple[Arrays, list[Arrays], nn.Module]:
    """First weights, the gradients of each step, and the model after them."""
    net = model()
    optimizer = make_optimizer(net, settings)
    before = [parameter.detach().double().numpy().copy() for parameter in net.parameters()]
    gradients = []
    for _ in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients.append([parameter.grad.double().numpy().copy() for parameter in net.parameters()])
        optimizer.step()
    return before, gradients, net


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_steps_as_torchs_and_as_its_formula(momentum: float, nesterov: bool) -> None:
    settings = SGD(type="sgd", learning_rate=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.01)
    before, gradients, net = stepped(settings)
    for number, parameter in enumerate(net.parameters()):
        decay = 0.01 if parameter.ndim >= 2 else 0.0
        theirs = nn.Parameter(torch.from_numpy(before[number].copy()))
        reference = torch.optim.SGD(
            [theirs], lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay, foreach=False
        )
        weight, kept = before[number], 0.0
        for step in gradients:
            theirs.grad = torch.from_numpy(step[number])
            reference.step()
            gradient = step[number] + decay * weight
            kept = momentum * kept + gradient
            weight = weight - 0.1 * (gradient + momentum * kept if nesterov else kept)
        torch.testing.assert_close(parameter.detach().double(), theirs.detach(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=0, atol=1e-6)


def test_signsgd_moves_by_the_rate_and_only_matrices_decay() -> None:
    before, gradients, net = stepped(SignSGD(type="signsgd", learning_rate=0.1, weight_decay=0.5))
    for number, parameter in enumerate(net.parameters()):
        weight = before[number]
        for step in gradients:
            weight = weight * (1 - 0.05 * (parameter.ndim >= 2)) - 0.1 * np.sign(step[number])
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=0, atol=1e-6)


def test_signsgd_leaves_a_weight_without_gradient() -> None:
    net = model()
    optimizer = make_optimizer(net, SignSGD(type="signsgd", learning_rate=0.1))
    before = net[0].weight.detach().clone()
    net[0].weight.grad = torch.zeros(4, 4)
    net[0].weight.grad[0, 0] = 1e-30
    optimizer.step()
    moved = before - net[0].weight.detach()
    assert moved[0, 0] == pytest.approx(0.1) and moved.count_nonzero() == 1


def test_clipping_scales_to_the_limit_and_leaves_small_gradients() -> None:
    net = model()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = global_norm(net.parameters())
    assert norm == pytest.approx((16 + 4 + 4 + 4) ** 0.5)
    clip(net.parameters(), norm, 100.0)
    assert global_norm(net.parameters()) == norm
    clip(net.parameters(), norm, 0.5)
    assert global_norm(net.parameters()) == pytest.approx(0.5)
