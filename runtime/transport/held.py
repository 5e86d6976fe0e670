"""A version of the weights that a receiver holds, brought from one to the next by what changed.

What is held is patched in place and checked against the new version's manifest. Whatever stands in the way
(nothing is held, the chain of changes does not reach back so far or is longer than the weights, a patch was
broken off), the way is the same: the chunks that are not there already are fetched. So a transfer that broke
off goes on from what had arrived.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from stackrl.runtime.transport.delta import apply_change
from stackrl.runtime.transport.hashes import chunk_hashes, hash_of
from stackrl.runtime.transport.held_folder import HeldFolder, HeldFolderBusy
from stackrl.runtime.transport.messages import (
    MessageError,
    TensorInfo,
    Version,
    WeightChanges,
    WeightManifest,
    decode,
    encode,
)
from stackrl.runtime.transport.source import Source, read_checked, read_chunks
from stackrl.runtime.transport.weights import DTYPES, WeightError, allocate, as_bytes, same_layout, size_of

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes: where a tensor begins in memory."""


def receive_held(
    source: Source, wanted: WeightManifest, folder: HeldFolder | None, deadline: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the version ``wanted``, as copies, after bringing what ``folder`` holds to it.

    Without a folder, or without room in it, the version is put together in this process's own memory and not
    kept. Raises as ``weights.receive`` does.
    """
    folder = _entered(folder)
    try:
        with folder.turn(deadline) if folder else contextlib.nullcontext():
            memory, holds = _open(folder, wanted)
            if holds is None or holds != wanted:
                if folder:
                    folder.manifest.unlink(missing_ok=True)
                fetched = bring(memory, holds, source, wanted)
                log.info(
                    "weight version %s: %d of %d bytes fetched", wanted.version, fetched, size_of(wanted)
                )
                if folder and memory.kept:
                    _write(folder, wanted)
    except HeldFolderBusy as error:
        raise WeightError(str(error)) from error
    for info, tensor in zip(wanted.tensors, memory.tensors, strict=True):
        yield info.name, tensor.clone()  # who loads it may keep it or change it


class Memory:
    """Room for the tensors of a manifest in a mapping; ``kept``: in a file that other processes see."""

    def __init__(self, infos: Sequence[TensorInfo], mapping: mmap.mmap, *, kept: bool) -> None:
        self.kept = kept
        self.tensors = [_tensor(mapping, info, at) for info, at in zip(infos, _places(infos), strict=True)]


def bring(memory: Memory, holds: WeightManifest | None, source: Source, wanted: WeightManifest) -> int:
    """Make ``memory``, which is the version ``holds`` (None: anything), the version ``wanted``, and check it.

    Returns the bytes that were fetched. Raises as ``weights.receive`` does: the memory is anything then.
    """
    start, chain = find_way(source, holds.version if holds else None, wanted)
    fetched = 0
    if holds is None or start != holds.version:
        whole = wanted if start == wanted.version else source.manifest(start)
        if not same_layout(whole.tensors, wanted.tensors):
            raise WeightError(
                f"{source.name}: weight version {start} has other tensors than {wanted.version}"
            )
        fetched += _fill(memory, holds, source, whole, touched=set())
        holds = whole
    if not chain:
        return fetched
    for changes in chain:
        fetched += _patch(memory, source, changes, wanted)
    touched = {at for changes in chain for at, one in enumerate(changes.tensors) if one.kind != "same"}
    if source.is_whole(wanted.version):
        return fetched + _fill(memory, holds, source, wanted, touched)
    for at in touched:
        info = wanted.tensors[at]
        if chunk_hashes(as_bytes(memory.tensors[at])) != info.chunks:
            raise WeightError(f"{info.name} of weight version {wanted.version} is not what its manifest says")
    return fetched


def find_way(
    source: Source, held: Version | None, wanted: WeightManifest
) -> tuple[Version, list[WeightChanges]]:
    """The version to begin with, ``held`` or one that is whole, and the changes from there to ``wanted``.

    From what is held, where the changes are fewer bytes than the weights. Raises WeightError where there is
    no way.
    """
    chain: list[WeightChanges] = []
    at, total = wanted.version, 0
    while held is not None and at > held and total < size_of(wanted):
        if (changes := _changes(source, at, wanted)) is None:
            break
        chain.insert(0, changes)
        at, total = changes.base, total + sum(one.bytes for one in changes.tensors)
    if at == held and total < max(1, size_of(wanted)):
        return held, chain
    chain, at = [], wanted.version
    while not source.is_whole(at):
        if (changes := _changes(source, at, wanted)) is None:
            raise WeightError(f"{source.name} has weight version {at} neither whole nor as what changed")
        chain.insert(0, changes)
        at = changes.base
    return at, chain


def _changes(source: Source, version: Version, wanted: WeightManifest) -> WeightChanges | None:
    changes = source.changes(version)
    if changes is None:
        return None
    if changes.version != version or changes.base >= version or len(changes.tensors) != len(wanted.tensors):
        raise WeightError(
            f"{source.name}: the changes to weight version {version} are those of another version"
        )
    for change, info in zip(changes.tensors, wanted.tensors, strict=True):
        if not 0 <= change.bytes <= info.bytes or not 0 <= change.count <= info.bytes:
            raise WeightError(
                f"{source.name}: {change.bytes} bytes of changes to {info.name} of {info.bytes}"
            )
    return changes


def _fill(
    memory: Memory, holds: WeightManifest | None, source: Source, wanted: WeightManifest, touched: set[int]
) -> int:
    """Fetch the chunks of ``wanted`` that are not there. Tensors that ``holds`` has the same, and that were
    not ``touched`` since, are."""
    fetched = offset = 0
    for at, (info, tensor) in enumerate(zip(wanted.tensors, memory.tensors, strict=True)):
        if holds is None or at in touched or holds.tensors[at] != info:
            fetched += read_chunks(source, wanted.version, info, offset, as_bytes(tensor), _is_other)
        offset += info.bytes
    return fetched


def _is_other(chunk: memoryview, expected: str) -> bool:
    return hash_of(chunk) != expected


def _patch(memory: Memory, source: Source, changes: WeightChanges, wanted: WeightManifest) -> int:
    offset = 0
    for change, info, tensor in zip(changes.tensors, wanted.tensors, memory.tensors, strict=True):
        if change.kind == "same":
            continue
        what = f"what changed in {info.name} of weight version {changes.version}"
        body = memoryview(bytearray(change.bytes))
        read_checked(
            lambda at, view: source.read_changes(changes.version, at, view),
            offset,
            body,
            change.hash,
            what,
            source.name,
        )
        try:
            apply_change(change, body, tensor)
        except (ValueError, RuntimeError) as error:
            raise WeightError(f"{what} from {source.name} cannot be applied: {error}") from error
        offset += change.bytes
    return offset


def _entered(folder: HeldFolder | None) -> HeldFolder | None:
    if folder:
        try:
            folder.enter()
        except OSError as error:
            _say_once(
                f"{folder.path} cannot hold weights ({error.strerror}): each update fetches all of them"
            )
            return None
    return folder


def _open(folder: HeldFolder | None, wanted: WeightManifest) -> tuple[Memory, WeightManifest | None]:
    """Room for ``wanted``, and what it holds: None where that is unknown, or of other tensors."""
    size = max(1, sum(_taken(info) for info in wanted.tensors))
    if folder:
        try:
            mapping = _mapped(folder, size)
        except OSError as error:
            _say_once(
                f"{folder.path} cannot hold weights of {size} bytes ({error.strerror}): each update fetches "
                "all of them"
            )
        else:
            return Memory(wanted.tensors, mapping, kept=True), _read(folder, wanted)
    return Memory(wanted.tensors, mmap.mmap(-1, size), kept=False), None


def _mapped(folder: HeldFolder, size: int) -> mmap.mmap:
    """The file of ``size`` bytes, all of which are there: a mapping must not run out of room when it is
    written.

    Raises OSError.
    """
    descriptor = os.open(folder.weights, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            folder.manifest.unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)


def _read(folder: HeldFolder, wanted: WeightManifest) -> WeightManifest | None:
    with contextlib.suppress(FileNotFoundError, MessageError):
        holds = decode(folder.manifest.read_bytes(), WeightManifest)
        if same_layout(holds.tensors, wanted.tensors):
            return holds
    return None


def _write(folder: HeldFolder, manifest: WeightManifest) -> None:
    """At once, so that what is found there is whole. Without room for it nothing is held."""
    new = folder.manifest.with_suffix(".new")
    try:
        new.write_bytes(encode(manifest))
        os.replace(new, folder.manifest)
    except OSError as error:
        _say_once(f"{folder.path} has no room for a manifest ({error.strerror}): each update fetches all")


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _tensor(mapping: mmap.mmap, info: TensorInfo, at: int) -> torch.Tensor:
    if info.bytes == 0:
        return allocate(info)
    dtype = DTYPES[info.dtype]
    return torch.frombuffer(mapping, dtype=dtype, count=info.bytes // dtype.itemsize, offset=at).view(
        info.shape
    )


def _places(infos: Sequence[TensorInfo]) -> Iterator[int]:
    return accumulate((_taken(info) for info in infos[:-1]), initial=0) if infos else iter(())


def _taken(info: TensorInfo) -> int:
    return -(-info.bytes // ALIGNMENT) * ALIGNMENT
