"""What changed in a tensor from one version to the next, in few bytes and to the last bit.

At the learning rates of reinforcement learning a step moves few of the bfloat16 weights, and those mostly to
the next number. So of the elements whose bits differ two things are told: how many unchanged ones lie before
each, and the difference of the bits read as an integer, in zigzag (0, -1, 1, -2, … as 0, 1, 2, 3, …). Both
are small numbers, whose bytes are laid out in planes (all lowest bytes first) and deflated. NaN, -0.0 and
infinities are bits like others.
"""

from __future__ import annotations

import struct
import zlib

import torch

from stackrl.runtime.transport.hashes import hash_of
from stackrl.runtime.transport.messages import TensorChange

MOST_CHANGED = 0.25
"""Share of the elements above which a tensor travels whole: what is saved would not be worth the time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEAD = struct.Struct("<QQ")
"""Bytes of the two parts: gaps and differences."""


def encode_change(old: torch.Tensor, new: torch.Tensor) -> tuple[TensorChange, memoryview]:
    """What makes ``new`` of ``old``, of the same shape and dtype, contiguous and on the CPU: told, and the
    bytes."""
    before, after = _bits(old), _bits(new)
    different = before != after
    count = int(torch.count_nonzero(different))
    if count == 0:
        return TensorChange("same", 0, 0, hash_of(b"")), memoryview(b"")
    if count <= MOST_CHANGED * after.numel():
        positions = different.nonzero().reshape(-1)
        gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
        differences = after[positions] - before[positions]
        body = _packed(_narrowed(gaps), _zigzag(differences))
        if len(body) < new.nbytes:
            return TensorChange("some", len(body), count, hash_of(body)), memoryview(body)
    whole = memoryview(new.detach().reshape(-1).view(torch.uint8).numpy())
    return TensorChange("whole", whole.nbytes, count, hash_of(whole)), whole


def apply_change(change: TensorChange, body: memoryview | bytes, tensor: torch.Tensor) -> None:
    """Turn ``tensor``, which must be the one that the change was made from, into the newer one, in place.

    Raises ValueError where ``body`` is no change of a tensor of this size.
    """
    if change.kind == "same":
        return
    bits = _bits(tensor)
    if change.kind == "whole":
        if len(body) != tensor.nbytes:
            raise ValueError(f"{len(body)} bytes for a tensor of {tensor.nbytes}")
        bits.copy_(torch.frombuffer(bytearray(body), dtype=bits.dtype))
        return
    gaps, differences = _unpacked(body, change.count, bits.element_size())
    positions = torch.cumsum(gaps + 1, 0) - 1
    if bool((gaps < 0).any()) or int(positions[-1]) >= bits.numel():
        raise ValueError(f"a change of element {int(positions[-1])} of {bits.numel()}")
    bits[positions] += _unzigzag(differences)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row, as integers that share their memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).view(_INTEGERS[tensor.element_size()])


def _zigzag(values: torch.Tensor) -> torch.Tensor:
    """The shift to the right keeps the sign: all ones or all zeros."""
    return (values << 1) ^ (values >> (8 * values.element_size() - 1))


def _unzigzag(values: torch.Tensor) -> torch.Tensor:
    low = values & 1
    # a shift to the right without the sign
    high = (values >> 1) & torch.iinfo(values.dtype).max
    return high ^ -low


def _narrowed(gaps: torch.Tensor) -> torch.Tensor:
    """In four bytes each, where none is larger."""
    return gaps if int(gaps.max()) > torch.iinfo(torch.int32).max else gaps.int()


def _packed(gaps: torch.Tensor, differences: torch.Tensor) -> bytes:
    parts = [_deflated(_planes(part)) for part in (gaps, differences)]
    return b"".join((_HEAD.pack(*map(len, parts)), *parts))


def _unpacked(body: memoryview | bytes, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` gaps as int64 and as many differences of ``size`` bytes. Raises ValueError."""
    try:
        first, second = _HEAD.unpack_from(body)
        rest = memoryview(body)[_HEAD.size :]
        if rest.nbytes != first + second:
            raise ValueError(f"{rest.nbytes} bytes of a change that has {first + second}")
        gaps = _inflated(rest[:first], 8 * count)
        differences = _inflated(rest[first:], size * count)
    except (struct.error, zlib.error) as error:
        raise ValueError(str(error)) from error
    width = len(gaps) // count
    if len(gaps) != width * count or width not in (4, 8) or len(differences) != size * count:
        raise ValueError(f"{len(gaps)} and {len(differences)} bytes for {count} changed elements")
    return _from_planes(gaps, width).long(), _from_planes(differences, size)


def _deflated(data: bytes) -> bytes:
    """Runs and frequent bytes are all that is to be found in it; a search for more takes longer and finds
    less."""
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return deflate.compress(data) + deflate.flush()


def _inflated(data: memoryview, most: int) -> bytes:
    """At most ``most`` bytes of it and one more, whatever it claims to be."""
    return zlib.decompressobj().decompress(data, most + 1)


def _planes(values: torch.Tensor) -> bytes:
    size = values.element_size()
    return values.view(torch.uint8).reshape(-1, size).t().contiguous().numpy().tobytes()


def _from_planes(data: bytes, size: int) -> torch.Tensor:
    planes = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(size, -1)
    return planes.t().contiguous().reshape(-1).view(_INTEGERS[size])
