from __future__ import annotations

import pytest
import torch
from torch import nn

from stackrl.runtime.trainer.optimizer import clip, global_norm, make_optimizer, rate
from stackrl.schemas.optimizers import AdamW


def rates(total: int = 10, **settings) -> list[float]:
    settings = AdamW(learning_rate=1.0, **settings)
    return [rate(step, settings, total) for step in range(total)]


def test_warmup_grows_to_the_rate_in_equal_steps() -> None:
    assert rates(warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_constant_rate_stays() -> None:
    assert rates() == [1.0] * 10


def test_linear_decay_falls_evenly_towards_its_final_share() -> None:
    assert rates(warmup_steps=2, decay="linear", final_rate=0.2)[2:] == pytest.approx(
        [1.0 - 0.1 * step for step in range(8)]
    )


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    values = rates(total=8, decay="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)


def test_a_stage_that_is_all_warmup_has_a_rate() -> None:
    assert rates(total=3, warmup_steps=3, decay="cosine") == pytest.approx([1 / 3, 2 / 3, 1.0])


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
