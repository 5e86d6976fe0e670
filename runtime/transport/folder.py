"""Weights through a folder that the trainer and the engines share, or a bucket that is mounted as one.

    <folder>/<version>/00000.safetensors …   about SHARD bytes each
    <folder>/<version>/changes               what changed since the version before, where that was asked for;
    <folder>/<version>/changes.manifest      then not every version has files of its own
    <folder>/<version>/readers/<who>         made by who begins to read the version, removed by who has ended
    <folder>/<version>/manifest              written last: a version without it is not there

The newest versions stay, with what they are made from. Older ones are removed when a newer one is complete
and nobody reads them; a reader that died is waited for no longer than an update may take.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from stackrl.runtime.run import write_durably
from stackrl.runtime.transport.messages import (
    MessageError,
    TensorInfo,
    Version,
    WeightChanges,
    WeightManifest,
    decode,
    encode,
)
from stackrl.runtime.transport.store import KEPT_CHANGES, Changes, Snapshot, take
from stackrl.runtime.transport.weights import (
    KEPT_VERSIONS,
    NamedTensors,
    Published,
    WeightError,
    size_of,
    snapshots,
)

MANIFEST, CHANGES, CHANGES_MANIFEST, READERS = "manifest", "changes", "changes.manifest", "readers"
SHARD = 1 << 30
"""Bytes of tensors that are gathered before they are written; a larger tensor makes its own file."""
LONGEST_CHAIN = 0.5
"""Bytes of changes, in those of a version, after which a version is written whole again."""
FULL_DISK = ("os error 28", "os error 122")
"""What safetensors says of a full disk and of a used-up quota."""
TRY_AGAIN = 2.0
"""Seconds between two tries to write to a full disk."""

log = logging.getLogger(__name__)


class FolderPublisher:
    """Writes versions to ``folder`` and removes those that are no longer needed."""

    def __init__(self, folder: Path | str, *, delta: bool = False, patience: float = 300.0) -> None:
        """``delta``: write what changed, and all only now and then. ``patience``: seconds for which a reader
        is waited for that does not end, and for room on a full disk."""
        self._folder, self._delta, self._patience = Path(folder), delta, patience
        self.source = str(self._folder.resolve())
        self._last: Snapshot | None = None
        """What changes are told against: the newest version that this publisher has written."""
        self._chain: list[int] = []
        """Bytes of the changes since the last version that is whole."""
        self._seen: dict[Path, float] = {}
        """When a reader that may not end was met first."""

    def publish(self, version: Version, tensors: NamedTensors) -> Published:
        """As Publisher.publish. A full disk is waited for, with the version before in its place; raises
        WeightError where it stays full."""
        complete = complete_versions(self._folder)
        if complete and version <= complete[-1]:
            raise WeightError(f"weight version {version} does not follow {complete[-1]} in {self._folder}")
        target = self._folder / str(version)
        self._write_out(lambda: _make_fresh(target))
        if self._delta:
            published = self._publish_changes(target, version, tensors)
        else:
            manifest = WeightManifest(
                version=version, tensors=_write(target, snapshots(tensors), self._write_out)
            )
            self._write_out(lambda: write_durably(target / MANIFEST, encode(manifest)))
            published = Published(size_of(manifest), size_of(manifest))
        self._remove_old()
        return published

    def close(self) -> None:
        """Nothing stays open; the versions stay for engines that still read them."""

    def _publish_changes(self, target: Path, version: Version, tensors: NamedTensors) -> Published:
        snapshot, changes = take(version, tensors, self._last)
        snapshot.manifest.changes_follow = True
        if changes:
            self._write_out(lambda: _write_changes(target, changes))
            self._chain.append(changes.bytes)
        if not changes or self._chain_is_long(snapshot.bytes):
            _write(target, zip(snapshot.manifest.tensors, snapshot.tensors, strict=True), self._write_out)
            self._chain = []
        self._write_out(lambda: write_durably(target / MANIFEST, encode(snapshot.manifest)))
        self._last = snapshot
        return Published(snapshot.bytes, changes.bytes if changes else snapshot.bytes)

    def _chain_is_long(self, whole: int) -> bool:
        return sum(self._chain) > LONGEST_CHAIN * whole or len(self._chain) >= KEPT_CHANGES

    def _write_out(self, write: Callable[[], None]) -> None:
        """Raises WeightError where there is no room for it within our patience."""
        deadline, said = time.monotonic() + self._patience, False
        while True:
            try:
                return write()
            except (OSError, SafetensorError) as error:
                if not _is_full(error):
                    raise WeightError(f"{self._folder} cannot be written to: {error}") from error
                self._remove_old(kept=1)
                if time.monotonic() > deadline:
                    raise WeightError(
                        f"{self._folder} is full for {self._patience:g} s: make room for new weights there, "
                        "or say weights.path"
                    ) from error
                if not said:
                    log.error(
                        "%s is full: new weights wait for room there for %g s, and the engines go on with "
                        "those that they have",
                        self._folder,
                        self._patience,
                    )
                    said = True
                time.sleep(TRY_AGAIN)

    def _remove_old(self, kept: int = KEPT_VERSIONS) -> None:
        """All but the newest versions, what those are made from, and what is still being read."""
        complete = complete_versions(self._folder)
        needed = set(complete[-kept:])
        for version in complete[-kept:]:
            while (base := _base(self._folder / str(version))) is not None:
                needed.add(version := base)
        for version in _versions(self._folder):
            if complete and version < complete[-1] and version not in needed and not self._is_read(version):
                (self._folder / str(version) / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self._folder / str(version), ignore_errors=True)

    def _is_read(self, version: Version) -> bool:
        now = time.monotonic()
        readers = list((self._folder / str(version) / READERS).glob("*"))
        waited = [now - self._seen.setdefault(reader, now) for reader in readers]
        if waited and min(waited) >= self._patience:
            log.warning(
                "%s of weight version %s have not ended; it is removed",
                ", ".join(r.name for r in readers),
                version,
            )
        return any(seconds < self._patience for seconds in waited)


def write_folder(folder: Path, version: Version, tensors: NamedTensors) -> None:
    """Write ``version``: it is there whole or not at all. Remains of an interrupted try are replaced."""
    target = folder / str(version)
    _make_fresh(target)
    infos = _write(target, snapshots(tensors), lambda write: write())
    write_durably(target / MANIFEST, encode(WeightManifest(version=version, tensors=infos)))


def complete_versions(folder: Path) -> list[Version]:
    """The versions that are there whole, oldest first."""
    return [version for version in _versions(folder) if (folder / str(version) / MANIFEST).exists()]


def _versions(folder: Path) -> list[Version]:
    """All that there is of versions, oldest first."""
    found = []
    for path in folder.glob("*.*"):
        try:
            found.append(Version.parse(path.name))
        except MessageError:
            continue
    return sorted(found)


def _make_fresh(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    (target / READERS).mkdir(parents=True)


def _write(
    target: Path,
    tensors: Iterable[tuple[TensorInfo, torch.Tensor]],
    write_out: Callable[[Callable[[], None]], None],
) -> list[TensorInfo]:
    """Files of about SHARD bytes, each passed to ``write_out``. Returns what the manifest says of them."""
    infos: list[TensorInfo] = []
    shard: dict[str, torch.Tensor] = {}
    files = 0
    for info, copy in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + info.bytes > SHARD:
            _save(shard, target / f"{files:05}.safetensors", write_out)
            shard, files = {}, files + 1
        shard[info.name] = copy
        infos.append(info)
    _save(shard, target / f"{files:05}.safetensors", write_out)
    return infos


def _save(
    shard: dict[str, torch.Tensor], file: Path, write_out: Callable[[Callable[[], None]], None]
) -> None:
    write_out(lambda: save_file(shard, file))


def _write_changes(target: Path, changes: Changes) -> None:
    with open(target / CHANGES, "wb") as file:
        file.writelines(changes.bodies)
    write_durably(target / CHANGES_MANIFEST, encode(changes.manifest))


def _base(target: Path) -> Version | None:
    """The version that the one in ``target`` can be had from alone; None where it is whole."""
    if any(target.glob("*.safetensors")):
        return None
    try:
        return decode((target / CHANGES_MANIFEST).read_bytes(), WeightChanges).base
    except (OSError, MessageError):
        return None


def _is_full(error: Exception) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or any(text in str(error) for text in FULL_DISK)
