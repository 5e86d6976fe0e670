"""What changed in a tensor makes the newer one of the older, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stackrl.runtime.transport.delta import apply_change, encode_change
from stackrl.runtime.transport.hashes import hash_of
from stackrl.runtime.transport.messages import TensorChange
from stackrl.runtime.transport.weights import DTYPES, as_bytes

SIZE = 4096


def bits(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: all NaNs, infinities and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (SIZE, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return values.reshape(-1).view(dtype) if dtype != torch.bool else values.reshape(-1) % 2 == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    changed=st.sampled_from([0, 1, 2, 40, 300, SIZE // 4, SIZE // 2, SIZE]),
    where=st.sampled_from(["spread", "first", "last"]),
)
def test_any_bits_come_back(dtype: torch.dtype, seed: int, changed: int, where: str) -> None:
    old, other = bits(seed, dtype), bits(seed + 1, dtype)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
    places = {"spread": order, "first": torch.arange(SIZE), "last": torch.arange(SIZE).flip(0)}[where][
        :changed
    ]
    new = old.clone()
    new[places] = other[places]
    change, body = encode_change(old, new)
    assert (change.bytes, change.hash) == (len(body), hash_of(body))
    assert change.bytes <= new.nbytes
    apply_change(change, body, old)
    assert bytes(as_bytes(old)) == bytes(as_bytes(new))


def test_bits_are_compared_and_not_numbers() -> None:
    old = torch.tensor([0.0, math.nan, 1.0, math.inf] * 8)
    new = old.clone()
    new[0], new[5] = -0.0, -math.nan
    assert encode_change(old, old.clone())[0].kind == "same"
    change, body = encode_change(old, new)
    assert change.count == 2
    apply_change(change, body, old)
    assert bytes(as_bytes(old)) == bytes(as_bytes(new))


def test_few_neighbouring_numbers_take_few_bytes() -> None:
    """Three in a hundred bfloat16 weights move to the next number: what a small learning rate does."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=generator).bfloat16()
    moved = torch.rand(1 << 20, generator=generator) < 0.03
    new = old.clone()
    new.view(torch.int16)[moved] += (
        torch.randint(0, 2, (int(moved.sum()),), generator=generator).short() * 2 - 1
    )
    change, _ = encode_change(old, new)
    assert change.kind == "some"
    assert change.count == int(moved.sum())
    assert change.bytes < 0.02 * new.nbytes


def test_many_changes_travel_whole() -> None:
    old, new = torch.zeros(1000), torch.ones(1000)
    change, body = encode_change(old, new)
    assert (change.kind, change.bytes, change.count) == ("whole", 4000, 1000)
    assert bytes(body) == bytes(as_bytes(new))


def test_a_change_of_something_else_is_refused() -> None:
    old = torch.zeros(4096)
    new = old.clone()
    new[[5, 4000]] = 1.0
    change, body = encode_change(old, new)
    for wrong, data, tensor in [
        (change, body, torch.zeros(4000)),
        (change, body[:-1], old),
        (change, b"", old),
        (TensorChange("some", len(body), 3, ""), body, old),
        (change, body, torch.zeros(4096).bfloat16()),
        (TensorChange("whole", 4, 1, ""), b"1234", old),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            apply_change(wrong, data, tensor.clone())
