"""All tensors of a version lie in its buckets, each once, in order, within the size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stackrl.runtime.transport import buckets as module
from stackrl.runtime.transport.buckets import ALIGNMENT, buckets, checksum
from stackrl.runtime.transport.weights import describe

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]

some_tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), min_size=0, max_size=12
)


def filled(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@settings(max_examples=60, deadline=None)
@given(some_tensors, st.integers(1, 600))
def test_what_is_unpacked_is_what_was_packed(made, size) -> None:
    tensors = [filled(dtype, shape, seed) for seed, (dtype, shape) in enumerate(made)]
    infos = [describe(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    laid_out = list(buckets(infos, size))
    assert [info for bucket in laid_out for info in bucket.tensors] == infos
    rest = iter(tensors)
    for bucket in laid_out:
        assert bucket.bytes <= size or len(bucket.tensors) == 1
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        inside = [next(rest) for _ in bucket.tensors]
        content = bucket.pack(inside, CPU)
        assert content.nbytes == bucket.bytes
        for given_one, got in zip(inside, bucket.unpack(content.clone()), strict=True):
            assert got.dtype == given_one.dtype and got.shape == given_one.shape
            assert torch.equal(got.view(-1).view(torch.uint8), given_one.reshape(-1).view(torch.uint8))


def test_small_ones_share_a_bucket_and_a_large_one_has_its_own() -> None:
    infos = [
        describe(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (10, 20, 5000, 30, 950, 50)
    ]
    assert [[info.name for info in bucket.tensors] for bucket in buckets(infos, 1000)] == [
        ["10", "20"],
        ["5000"],
        ["30"],
        ["950"],
        ["50"],
    ]


def test_gaps_carry_nothing_of_the_memory_before() -> None:
    infos = [describe(name, torch.ones(1, dtype=torch.uint8)) for name in "ab"]
    (bucket,) = buckets(infos, 1000)
    for _ in range(50):
        torch.full((bucket.bytes,), 7, dtype=torch.uint8)  # memory that is free again
        assert int(bucket.pack([torch.ones(1, dtype=torch.uint8)] * 2, CPU).sum()) == 2


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100_003])
def test_a_checksum_tells_changed_and_exchanged_words(size: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CHECKED_AT_ONCE", 1000)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    told = checksum(content)
    assert torch.equal(told, checksum(content.clone()))
    for place in {0, size // 2, size - 1} if size else ():
        changed = content.clone()
        changed[place] ^= 1
        assert not torch.equal(told, checksum(changed))
    if size >= 16:
        exchanged = content.clone()
        exchanged[:8], exchanged[8:16] = content[8:16], content[:8]
        assert not torch.equal(told, checksum(exchanged))
