"""How the tensors of a version are laid out in the buckets of a broadcast, the same on all sides.

A bucket holds consecutive tensors of the manifest, as many as fit into its size; one that is larger has a
bucket of its own, which travels in slices. So nobody holds more than a few buckets, or the largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from stackrl.runtime.transport.messages import TensorInfo
from stackrl.runtime.transport.weights import DTYPES

ALIGNMENT = 64
"""Bytes between whose multiples tensors begin: any dtype can be read there."""
_CHECKED_AT_ONCE = 1 << 22
"""Words of 8 bytes whose products are in memory at a time."""


@dataclass(frozen=True)
class Bucket:
    """``tensors`` of a manifest; each begins at its offset of ``offsets`` in ``bytes`` bytes."""

    tensors: Sequence[TensorInfo]
    offsets: Sequence[int]
    bytes: int

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Its content, uint8 [bytes] on ``device``, of contiguous CPU ``tensors``. One that stays on the CPU
        alone in its bucket is not copied."""
        if len(tensors) == 1 and device.type == "cpu":
            return _flat(tensors[0])
        packed = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        end = 0
        for tensor, info, offset in zip(tensors, self.tensors, self.offsets, strict=True):
            packed[end:offset].zero_()  # what lay in this memory before is nobody's business
            packed[offset : offset + info.bytes].copy_(_flat(tensor))
            end = offset + info.bytes
        return packed

    def unpack(self, content: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its tensors, as views of ``content``."""
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            yield content[offset : offset + info.bytes].view(DTYPES[info.dtype]).view(info.shape)


def buckets(tensors: Sequence[TensorInfo], size: int) -> Iterator[Bucket]:
    """Buckets of at most ``size`` bytes, or of one tensor, that hold ``tensors`` in their order."""
    held: list[TensorInfo] = []
    offsets: list[int] = []
    end = 0
    for info in tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if held and offset + info.bytes > size:
            yield Bucket(held, offsets, end)
            held, offsets, offset = [], [], 0
        held.append(info)
        offsets.append(offset)
        end = offset + info.bytes
    if held:
        yield Bucket(held, offsets, end)


def checksum(content: torch.Tensor) -> torch.Tensor:
    """int64 [2] of the bytes ``content``, on its device: other where one word or the order of two differs.

    For the memory of a GPU, from which a hash would have to be fetched first.
    """
    whole = content.numel() // 8 * 8
    words, rest = content[:whole].view(torch.int64), content[whole:].to(torch.int64)
    result = torch.zeros(2, dtype=torch.int64, device=content.device)
    place = 0
    for part in (*words.split(_CHECKED_AT_ONCE), rest):
        odd = 2 * torch.arange(place, place + part.numel(), device=content.device) + 1
        result[0] += part.sum()
        result[1] += (part * odd).sum()  # an odd factor loses no change of its word
        place += part.numel()
    return result


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
