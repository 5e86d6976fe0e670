"""The receiving end of weights through a folder (folder.py)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from stackrl.runtime.transport.folder import CHANGES, CHANGES_MANIFEST, MANIFEST, READERS, complete_versions
from stackrl.runtime.transport.messages import MessageError, Version, WeightChanges, WeightManifest, decode
from stackrl.runtime.transport.weights import WeightError, WeightsGone

_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100 << 20
"""Bytes, as the format of safetensors has it."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are: ``offset`` in the version, ``position`` in ``file``."""

    offset: int
    file: Path
    position: int


class FolderSource:
    """A folder of weights as a receiver sees it: what it reads from says so, and does not go meanwhile.

    Nothing lasts beyond ``deadline`` (time.monotonic seconds).
    """

    def __init__(self, folder: Path | str, deadline: float) -> None:
        self.name = str(folder)
        self._folder, self._deadline = Path(folder), deadline
        self._claims: dict[Version, Path] = {}
        self._places: dict[Version, list[_Place]] = {}

    def __enter__(self) -> FolderSource:
        return self

    def __exit__(self, *_: object) -> None:
        for claim in self._claims.values():
            with contextlib.suppress(OSError):
                claim.unlink()

    def manifest(self, version: Version) -> WeightManifest:
        self._claim(version)
        return self._message(version, MANIFEST, WeightManifest)

    def is_whole(self, version: Version) -> bool:
        return any((self._folder / str(version)).glob("*.safetensors"))

    def read(self, version: Version, offset: int, view: memoryview) -> None:
        if version not in self._places:
            self._places[version] = self._find_places(version)
        places = self._places[version]
        place = places[bisect_right(places, offset, key=lambda one: one.offset) - 1]
        self._fill(version, place.file, place.position + offset - place.offset, view)

    def changes(self, version: Version) -> WeightChanges | None:
        self._claim(version)
        if not (self._folder / str(version) / CHANGES_MANIFEST).exists():
            return None
        return self._message(version, CHANGES_MANIFEST, WeightChanges)

    def read_changes(self, version: Version, offset: int, view: memoryview) -> None:
        self._fill(version, self._folder / str(version) / CHANGES, offset, view)

    def _claim(self, version: Version) -> None:
        """Say that ``version`` is being read. A folder that cannot be written to is read without."""
        if version not in self._claims:
            claim = self._folder / str(version) / READERS / f"{socket.gethostname()}-{os.getpid()}"
            with contextlib.suppress(OSError):
                claim.touch()
                self._claims[version] = claim

    def _message(self, version: Version, name: str, kind: type) -> WeightManifest | WeightChanges:
        file = self._folder / str(version) / name
        try:
            return decode(file.read_bytes(), kind)
        except FileNotFoundError as error:
            raise self._absent(version) from error
        except (OSError, MessageError) as error:
            raise WeightError(f"{file} cannot be read: {error}") from error

    def _fill(self, version: Version, file: Path, position: int, view: memoryview) -> None:
        if time.monotonic() > self._deadline:
            raise WeightError(f"{file} could not be read in time; raise weights.timeout")
        try:
            with open(file, "rb", buffering=0) as opened:
                opened.seek(position)
                done = 0
                while done < view.nbytes:
                    count = opened.readinto(view[done:])
                    if not count:
                        raise WeightError(f"{file} cannot be read: it ends at byte {position + done}")
                    done += count
        except FileNotFoundError as error:
            raise self._absent(version) from error
        except OSError as error:
            raise WeightError(f"{file} cannot be read: {error.strerror}") from error

    def _find_places(self, version: Version) -> list[_Place]:
        """Of each tensor of the manifest that has bytes."""
        target = self._folder / str(version)
        found = {
            name: place for file in sorted(target.glob("*.safetensors")) for name, place in _header(file)
        }
        places, offset = [], 0
        for info in self.manifest(version).tensors:
            if info.name not in found:
                raise WeightError(f"{info.name} of weight version {version} is missing in {target}")
            file, begin, end = found[info.name]
            if end - begin != info.bytes:
                raise WeightError(
                    f"{info.name} in {file} has {end - begin} bytes, the manifest says {info.bytes}"
                )
            if info.bytes:
                places.append(_Place(offset, file, begin))
            offset += info.bytes
        return places

    def _absent(self, version: Version) -> WeightError:
        complete = complete_versions(self._folder)
        if complete and version < complete[-1]:
            return WeightsGone(
                f"weight version {version} is gone from {self.name}, {complete[-1]} is the newest"
            )
        newest = complete[-1] if complete else "none"
        return WeightError(f"weight version {version} is not in {self.name}, {newest} is the newest")


def _header(file: Path) -> list[tuple[str, tuple[Path, int, int]]]:
    """The tensors of a safetensors file: name, and where its bytes begin and end. Raises WeightError."""
    try:
        with open(file, "rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
        start = _LENGTH.size + length
        return [
            (name, (file, start + begin, start + end))
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{file} cannot be read: {error}") from error
