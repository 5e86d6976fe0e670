"""Where a receiver reads versions from, whichever way they travel, and how it checks what it has read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from stackrl.runtime.transport.hashes import chunks, hash_of
from stackrl.runtime.transport.messages import TensorInfo, Version, WeightChanges, WeightManifest
from stackrl.runtime.transport.weights import WeightError, allocate, as_bytes

log = logging.getLogger(__name__)


class Source(AbstractContextManager["Source"], Protocol):
    """A publisher as a receiver sees it: the bytes of a version are those of its tensors, in the manifest's
    order and without gaps. All calls raise as ``weights.receive`` does."""

    name: str
    """For errors: its URL or folder."""

    def manifest(self, version: Version) -> WeightManifest: ...

    def is_whole(self, version: Version) -> bool:
        """Whether the bytes of ``version`` itself can be read, not only what changed."""

    def read(self, version: Version, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``version`` from ``offset`` on."""

    def changes(self, version: Version) -> WeightChanges | None:
        """What made ``version``; None where that cannot be had."""

    def read_changes(self, version: Version, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of those changes, which lie one after another, from ``offset`` on."""


def open_source(source: str, token: str, deadline: float) -> Source:
    """What ``source``, a URL or a folder, names. ``deadline``: time.monotonic seconds."""
    from stackrl.runtime.transport.folder_source import FolderSource
    from stackrl.runtime.transport.pull_source import PullSource

    return (
        PullSource(source, token, deadline)
        if source.startswith("http://")
        else FolderSource(source, deadline)
    )


def receive_whole(
    source: Source, manifest: WeightManifest, already: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a version that ``is_whole``, checked, one at a time, but for the ones received
    ``already``, the first so many."""
    offset = sum(info.bytes for info in manifest.tensors[:already])
    for info in manifest.tensors[already:]:
        tensor = allocate(info)
        read_chunks(source, manifest.version, info, offset, as_bytes(tensor))
        offset += info.bytes
        yield info.name, tensor


def read_chunks(
    source: Source,
    version: Version,
    info: TensorInfo,
    offset: int,
    view: memoryview,
    wanted: Callable[[memoryview, str], bool] = lambda chunk, hash: True,
) -> int:
    """Read into ``view``, memory of the tensor that begins at ``offset``, its chunks that are ``wanted``.

    Returns the bytes that were read. Raises WeightError where a chunk is not what its manifest says, twice.
    """
    read = 0
    for number, (chunk, expected) in enumerate(zip(chunks(view), info.chunks, strict=True), start=1):
        if wanted(chunk, expected):
            what = f"{info.name} of weight version {version} (chunk {number} of {len(info.chunks)})"
            read_checked(
                lambda at, part: source.read(version, at, part), offset, chunk, expected, what, source.name
            )
            read += chunk.nbytes
        offset += chunk.nbytes
    return read


def read_checked(
    read: Callable[[int, memoryview], None],
    offset: int,
    view: memoryview,
    expected: str,
    what: str,
    source: str,
) -> None:
    """Fill ``view`` by ``read`` with bytes of the hash ``expected``: at the second try if need be.

    Raises WeightError, which names ``what``.
    """
    read(offset, view)
    if hash_of(view) == expected:
        return
    log.warning("%s from %s came damaged and is fetched again", what, source)
    read(offset, view)
    if hash_of(view) != expected:
        raise WeightError(
            f"{what} from {source} is not what its manifest says, twice: it is damaged there or underway"
        )
