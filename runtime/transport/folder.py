"""Weights through a folder that the trainer and the engines share.

    <folder>/<version>/00000.safetensors …   about SHARD bytes each
    <folder>/<version>/manifest              written last: a version without it is not there

The newest versions stay, older ones are removed when a newer one is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stackrl.runtime.run import write_durably
from stackrl.runtime.transport.messages import (
    MessageError,
    TensorInfo,
    Version,
    WeightManifest,
    decode,
    encode,
)
from stackrl.runtime.transport.weights import (
    KEPT_VERSIONS,
    NamedTensors,
    WeightError,
    WeightsGone,
    check_manifest,
    snapshots,
    verify,
)

SHARD = 1 << 30
"""Bytes of tensors that are gathered before they are written; a larger tensor makes its own file."""


class FolderPublisher:
    """Writes versions to ``folder`` and removes those that are no longer needed."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self.source = str(self._folder.resolve())

    def publish(self, version: Version, tensors: NamedTensors) -> None:
        complete = complete_versions(self._folder)
        if complete and version <= complete[-1]:
            raise WeightError(f"weight version {version} does not follow {complete[-1]} in {self._folder}")
        write_folder(self._folder, version, tensors)
        for old in complete_versions(self._folder)[:-KEPT_VERSIONS]:
            shutil.rmtree(self._folder / str(old))

    def close(self) -> None:
        """Nothing stays open; the versions stay for engines that still read them."""


def write_folder(folder: Path, version: Version, tensors: NamedTensors) -> None:
    """Write ``version``: it is there whole or not at all. Remains of an interrupted try are replaced."""
    target = folder / str(version)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    infos: list[TensorInfo] = []
    shard: dict[str, torch.Tensor] = {}
    files = 0
    for info, copy in snapshots(tensors):
        if shard and sum(t.nbytes for t in shard.values()) + info.bytes > SHARD:
            save_file(shard, target / f"{files:05}.safetensors")
            shard, files = {}, files + 1
        shard[info.name] = copy
        infos.append(info)
    save_file(shard, target / f"{files:05}.safetensors")
    write_durably(target / "manifest", encode(WeightManifest(version=version, tensors=infos)))


def read_folder(folder: Path | str, version: Version) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``version`` in ``folder``, its hash checked, one at a time.

    Raises as ``weights.receive`` does.
    """
    source = str(folder)
    target = Path(folder) / str(version)
    try:
        manifest = decode((target / "manifest").read_bytes(), WeightManifest)
        check_manifest(manifest, version, source)
        place = {name: file for file in sorted(target.glob("*.safetensors")) for name in _names(file)}
        for info in manifest.tensors:
            if info.name not in place:
                raise WeightError(f"{info.name} of weight version {version} is missing in {target}")
            with safe_open(place[info.name], framework="pt") as file:
                tensor = file.get_tensor(info.name)
            verify(info, tensor, version, source)
            yield info.name, tensor
    except FileNotFoundError as error:
        raise _absent(Path(folder), version) from error
    except (MessageError, SafetensorError) as error:
        raise WeightError(f"weight version {version} in {target} cannot be read: {error}") from error


def complete_versions(folder: Path) -> list[Version]:
    """The versions that are there whole, oldest first."""
    return sorted(Version.parse(manifest.parent.name) for manifest in folder.glob("*.*/manifest"))


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _absent(folder: Path, version: Version) -> WeightError:
    complete = complete_versions(folder)
    if complete and version < complete[-1]:
        return WeightsGone(f"weight version {version} is gone from {folder}, {complete[-1]} is the newest")
    newest = complete[-1] if complete else "none"
    return WeightError(f"weight version {version} is not in {folder}, {newest} is the newest")
