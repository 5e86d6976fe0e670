"""Versions of the weights in the memory of the trainer, and what changed from each to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stackrl.runtime.transport.delta import encode_change
from stackrl.runtime.transport.messages import (
    TensorChange,
    TensorInfo,
    Version,
    WeightChanges,
    WeightManifest,
)
from stackrl.runtime.transport.weights import (
    KEPT_VERSIONS,
    NamedTensors,
    Published,
    WeightError,
    WeightsGone,
    as_bytes,
    same_layout,
    size_of,
    snapshots,
)

PIECE = 8 << 20
"""Bytes that are handed out at once."""
KEPT_CHANGES = 16
"""Versions whose changes are kept, so that a receiver may be so far behind; they never hold more than a
version."""


@dataclass(frozen=True)
class Snapshot:
    """One version in host memory; ``tensors`` in the manifest's order."""

    manifest: WeightManifest
    tensors: list[torch.Tensor]

    def pieces(self, offset: int) -> Iterator[memoryview]:
        """Its bytes from ``offset`` on, at most PIECE at a time, without copies."""
        return _pieces(map(as_bytes, self.tensors), offset)

    @property
    def bytes(self) -> int:
        return size_of(self.manifest)


@dataclass(frozen=True)
class Changes:
    """What makes one version of the one before it; ``bodies`` in the manifest's order."""

    manifest: WeightChanges
    bodies: list[memoryview]

    def pieces(self, offset: int) -> Iterator[memoryview]:
        return _pieces(iter(self.bodies), offset)

    @property
    def bytes(self) -> int:
        return sum(change.bytes for change in self.manifest.tensors)


def take(version: Version, tensors: NamedTensors, before: Snapshot | None) -> tuple[Snapshot, Changes | None]:
    """A copy of ``tensors`` as ``version``, and what changed since ``before``: None where it has other
    tensors.

    Raises WeightError where a name comes twice.
    """
    infos: list[TensorInfo] = []
    copies: list[torch.Tensor] = []
    changes: list[TensorChange] = []
    bodies: list[memoryview] = []
    comparable = before is not None
    for info, copy in snapshots(tensors):
        at = len(infos)
        infos.append(info)
        copies.append(copy)
        comparable = comparable and same_layout(before.manifest.tensors[at : at + 1], [info])
        if comparable:
            change, body = encode_change(before.tensors[at], copy)
            changes.append(change)
            bodies.append(body)
    snapshot = Snapshot(WeightManifest(version=version, tensors=infos), copies)
    if not (comparable and len(infos) == len(before.tensors)):
        return snapshot, None
    manifest = WeightChanges(version=version, base=before.manifest.version, tensors=changes)
    return snapshot, Changes(manifest, bodies)


class WeightStore:
    """The versions that can be fetched: the newest and the one before it, never more than two in memory."""

    def __init__(self, *, delta: bool = False) -> None:
        """``delta``: keep what changed too, for receivers that hold an older version."""
        self._delta = delta
        self._lock = threading.Lock()
        self._kept: dict[Version, Snapshot] = {}
        self._changes: dict[Version, Changes] = {}
        self._newest: Version | None = None

    def publish(self, version: Version, tensors: NamedTensors) -> Published:
        """Copy ``tensors`` as ``version``. Raises WeightError unless it is newer than all before."""
        if self._newest is not None and version <= self._newest:
            raise WeightError(f"weight version {version} does not follow {self._newest}, which is published")
        self._forget_all_but(KEPT_VERSIONS - 1)
        snapshot, changes = take(version, tensors, self.newest() if self._delta else None)
        snapshot.manifest.changes_follow = self._delta
        with self._lock:
            self._kept[version] = snapshot
            self._newest = version
            if changes:
                self._changes[version] = changes
            self._forget_old_changes(most=snapshot.bytes)
        return Published(snapshot.bytes, min(changes.bytes, snapshot.bytes) if changes else snapshot.bytes)

    def newest(self) -> Snapshot | None:
        with self._lock:
            return None if self._newest is None else self._kept[self._newest]

    def get(self, version: Version) -> Snapshot:
        """Raises WeightsGone where ``version`` was replaced, KeyError where it was never published."""
        with self._lock:
            if version in self._kept:
                return self._kept[version]
            raise self._absent(version)

    def changes(self, version: Version) -> Changes:
        """What made ``version``. Raises as ``get`` does, and KeyError where nothing came before it."""
        with self._lock:
            if version in self._changes:
                return self._changes[version]
            if version in self._kept:
                raise KeyError(f"weight version {version} can be had whole only")
            raise self._absent(version)

    def _absent(self, version: Version) -> WeightsGone | KeyError:
        if self._newest is not None and version < self._newest:
            return WeightsGone(f"weight version {version} is gone, {self._newest} is the newest")
        return KeyError(f"weight version {version} is not there, {self._newest or 'none'} is the newest")

    def _forget_all_but(self, count: int) -> None:
        with self._lock:
            for version in sorted(self._kept)[:-count]:
                del self._kept[version]

    def _forget_old_changes(self, most: int) -> None:
        """Those that together with newer ones are longer than ``most`` bytes would not be fetched."""
        kept = sorted(self._changes, reverse=True)
        total = 0
        for number, version in enumerate(kept):
            total += self._changes[version].bytes
            if number >= KEPT_CHANGES or total >= most:
                del self._changes[version]


def _pieces(buffers: Iterator[memoryview], offset: int) -> Iterator[memoryview]:
    for data in buffers:
        for start in range(min(offset, data.nbytes), data.nbytes, PIECE):
            yield data[start : start + PIECE]
        offset = max(0, offset - data.nbytes)
