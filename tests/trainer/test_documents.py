from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stackrl.runtime.trainer.models.documents import attend, layout

MIXES = {
    "one": [7],
    "equal": [5, 5, 5],
    "mixed": [1, 2, 3, 9, 17, 4, 16, 33, 1, 8],
    "long and short": [300, 1, 2, 1],
}


@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_packed_attention_equals_attention_of_each_document_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    states = [torch.randn(total, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    pull = torch.randn(total, 4, 8)
    packed = attend(*states, layout(np.array(lengths)))
    packed_gradients = torch.autograd.grad((packed * pull).sum(), states)

    alone = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in states), strict=True):
        q, k, v = (tensor.transpose(0, 1)[None].double() for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
        alone.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    expected = torch.cat(alone)
    gradients = torch.autograd.grad((expected * pull).sum(), states)

    torch.testing.assert_close(packed.double(), expected, rtol=0, atol=1e-5)
    for got, exact in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-5)


def test_positions_restart_with_each_document() -> None:
    assert layout(np.array([3, 1, 2])).positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_padding_stays_below_half_whatever_the_mix() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = np.ceil(rng.lognormal(4, 1.5, rng.integers(1, 200))).astype(int)
        padded = sum(block.queries.numel() for block in layout(lengths).blocks)
        assert lengths.sum() <= padded < 2 * lengths.sum()
