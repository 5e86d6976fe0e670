"""The chunked head against float64 by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stackrl.runtime.trainer import head
from stackrl.runtime.trainer.head import token_logprobs

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) / 2
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperatures = torch.rand(TOKENS, generator=generator, dtype=torch.float64) + 0.5
    pull = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, targets, temperatures.to(dtype), pull.to(dtype)


def by_hand(hidden, weight, targets, temperatures):
    logits = hidden.double() @ weight.double().T / temperatures.double()[:, None]
    distribution = logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = distribution[torch.arange(TOKENS), targets].log()
    return chosen, -(distribution * distribution.log()).sum(-1)


@pytest.fixture(params=[1 << 20, 3 * VOCABULARY], ids=["all rows at once", "three rows at once"])
def _at_once(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.AT_ONCE, "cpu", request.param)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("chunk", [1, 8, 37, 1024])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_values_and_gradients_equal_float64_by_hand(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets, temperatures, pull = inputs(dtype)
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk)
    (logprobs * pull).sum().backward()

    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact, exact_entropies = by_hand(exact_hidden, exact_weight, targets, temperatures)
    (exact * pull.double()).sum().backward()

    assert relative(logprobs, exact) <= tolerance
    assert relative(entropies, exact_entropies) <= tolerance
    assert relative(hidden.grad, exact_hidden.grad) <= tolerance
    assert relative(weight.grad, exact_weight.grad) <= tolerance
    assert not entropies.requires_grad


@pytest.mark.parametrize("emulates", [False, True])
def test_bfloat16_rounds_products_alone(emulates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "emulated", lambda device, dtype: emulates and dtype == torch.bfloat16)
    hidden, weight, targets, temperatures, pull = inputs(torch.bfloat16)
    temperatures, pull = temperatures.float(), pull.float()
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, 8)
    (logprobs * pull).sum().backward()
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact, exact_entropies = by_hand(exact_hidden, exact_weight, targets, temperatures)
    (exact * pull.double()).sum().backward()
    assert logprobs.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    assert max(relative(logprobs, exact), relative(entropies, exact_entropies)) <= 2e-3
    assert max(relative(hidden.grad, exact_hidden.grad), relative(weight.grad, exact_weight.grad)) <= 5e-3


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, temperatures, _ = inputs(torch.float32)
    logprobs, entropies = token_logprobs(hidden * 1e4, weight, targets, temperatures, 8)
    assert logprobs.isfinite().all() and entropies.isfinite().all()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "beside adapters"])
def test_no_tokens_give_zero_gradients(frozen: bool) -> None:
    hidden, weight, targets, temperatures, _ = inputs(torch.float32)
    weight.requires_grad_(not frozen)
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0], temperatures[:0], 8)
    logprobs.sum().backward()
    assert hidden.grad.eq(0).all()
    assert weight.grad is None if frozen else weight.grad.eq(0).all()


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_no_tensor_is_tokens_by_vocabulary() -> None:
    hidden, weight, targets, temperatures, pull = inputs(torch.float32)
    with _Largest() as largest:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, 4)
        (logprobs * pull).sum().backward()
    assert largest.numel == max(4 * VOCABULARY, weight.numel())
