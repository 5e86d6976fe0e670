"""What is told of bytes that travel, so that a receiver knows whether it has them, and has them right.

A tensor is cut into chunks of CHUNK bytes, the last one shorter, and each is known by its hash: a receiver
that holds a chunk of that hash does not fetch it, and one that came wrong is fetched again by itself. The
hash finds accidents; against strangers there is the run's token.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

CHUNK = 16 << 20
"""Bytes."""


def hash_of(data: memoryview | bytes) -> str:
    """XXH3, 128 bits, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def chunks(data: memoryview) -> Iterator[memoryview]:
    """``data`` in pieces of at most CHUNK bytes; none where it is empty."""
    for start in range(0, data.nbytes, CHUNK):
        yield data[start : start + CHUNK]


def chunk_hashes(data: memoryview) -> list[str]:
    return [hash_of(chunk) for chunk in chunks(data)]
