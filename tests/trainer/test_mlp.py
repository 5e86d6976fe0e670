"""Experts: the grouped product against the loop, and the router's choices."""

from __future__ import annotations

import pytest
import torch

from stackrl.runtime.trainer.models.mlp import Mixture, Router, groupable, grouped_product, looped_product
from stackrl.runtime.trainer.models.shape import Experts

COUNTS = torch.tensor([3, 0, 7, 1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_equals_the_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outcomes = []
    rows, matrices = torch.randn(11, 16).to(dtype), torch.randn(5, 24, 16).to(dtype)
    for product in (grouped_product, looped_product):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, matrices)]
        result = product(*leaves, COUNTS)
        result.square().sum().backward()
        outcomes.append([result, *(leaf.grad for leaf in leaves)])
    for grouped, looped in zip(*outcomes, strict=True):
        torch.testing.assert_close(grouped, looped)
    assert not outcomes[0][2][COUNTS == 0].any()


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 16, 8), torch.bfloat16, True),
        ((2, 16, 33), torch.bfloat16, False),
        ((2, 12, 8), torch.bfloat16, False),
        ((2, 12, 8), torch.float32, True),
    ],
)
def test_what_the_grouped_product_cannot_take_is_known(shape, dtype, expected: bool) -> None:
    assert groupable(torch.empty(shape, dtype=dtype)) == expected


@pytest.mark.parametrize("intermediate", [32, 33], ids=["grouped", "looped"])
def test_a_mixture_is_the_sum_of_its_experts(intermediate: int) -> None:
    mixture = made(Experts(6, 2, intermediate, "softmax", scale=2.0, shared=16))
    states = torch.randn(20, 16)
    weights, chosen = mixture.gate(states)
    expected = mixture.shared_experts(states)
    for token in range(len(states)):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (mixture.experts.gate_up_proj[expert] @ states[token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected[token] += weight * (mixture.experts.down_proj[expert] @ hidden)
    result = mixture(states)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(weights.sum(1), torch.full((20,), 2.0))
    result.sum().backward()  # its gradient has no memory of its own, which the grouped product does not take
    assert all(parameter.grad.isfinite().all() for parameter in mixture.parameters())


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    router = made(Experts(6, 2, 8, "sigmoid", corrected=True, normalized=False)).gate
    states = torch.randn(30, 16)
    router.e_score_correction_bias[4] = 10.0
    weights, chosen = router(states)
    assert chosen.eq(4).any(1).all() and weights.le(1).all()
    torch.testing.assert_close(weights, (states @ router.weight.T).sigmoid().gather(1, chosen))


def test_experts_come_from_the_best_groups() -> None:
    router: Router = made(Experts(6, 2, 8, "sigmoid", groups=3, groups_chosen=1)).gate
    # the best single expert is in the first group, the best pair in the last
    scores = torch.tensor([[0.9, 0.0, 0.2, 0.3, 0.6, 0.5]])
    assert router.choose(scores).sort().values.tolist() == [[4, 5]]


def made(shape: Experts) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(shape, 16)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.3)
    return mixture
