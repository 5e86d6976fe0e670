"""Products of bfloat16 made in float32: the same numbers, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stackrl.runtime.trainer.models import mlp
from stackrl.runtime.trainer.models.emulation import emulated, widen_products


def close(got: torch.Tensor, exact: torch.Tensor) -> bool:
    assert got.dtype == torch.bfloat16
    return bool((got.double() - exact).norm() <= 4e-3 * exact.norm())  # one rounding to eight bits


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_round_once(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(300, 40, bias=bias).bfloat16()
    states = torch.randn(7, 300).bfloat16().requires_grad_()
    pull = torch.randn(7, 40).bfloat16()
    names = list(linear.state_dict())
    widen_products(nn.ModuleList([linear]))
    result = linear(states)
    result.backward(pull)
    weight = linear.weight.double()
    assert close(result, states.double() @ weight.T + (linear.bias.double() if bias else 0))
    assert close(states.grad, pull.double() @ weight)
    assert close(linear.weight.grad, pull.double().T @ states.double())
    assert list(linear.state_dict()) == names


def test_experts_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "emulated", lambda device, dtype: dtype == torch.bfloat16)
    torch.manual_seed(0)
    rows, matrices = torch.randn(9, 24).bfloat16(), torch.randn(3, 16, 24).bfloat16()
    exact = [part.double() @ m.double().T for part, m in zip(rows.split([4, 0, 5]), matrices, strict=True)]
    assert close(mlp.product(rows, matrices, torch.tensor([4, 0, 5])), torch.cat(exact))


def test_only_bfloat16_on_cpus_is_emulated() -> None:
    assert not emulated("cuda", torch.bfloat16) and not emulated("cpu", torch.float32)
    assert emulated("cpu", torch.bfloat16) != torch.ops.mkldnn._is_mkldnn_bf16_supported()
