"""Checkpoints as folders: complete or not at all.

    step-000050/          resumes at optimizer step 50: 50 are behind, supervised ones included
      trainer/            sharded weights and optimizer state, progress.json         (trainer)
      orchestrator/       snapshot of the journal                                    (orchestrator)
      manifest.json       name, size and SHA-256 of every file above, written last   (orchestrator)
                          with index, incarnation and ranks of the trainer that wrote it, and
                          the seconds that the run had used of its limits.hours

A folder without a manifest was never finished; one whose files differ from it is damaged. Both are passed
over in favour of the one before, and taken out of its way when the run goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stackrl.runtime.run import write_durably

MANIFEST = "manifest.json"
BOOKS = "orchestrator"
"""A checkpoint's folder for the journal's snapshot, the stack, and what the run had told of itself."""
_FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})")
_DAMAGED_NAME = re.compile(rf"{_NAME.pattern}\.damaged")

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint that cannot be used. The text names the folder and what is wrong with it."""


def folder(path: Path, index: int) -> Path:
    """The checkpoint under ``path`` that resumes at optimizer step ``index``."""
    return path / f"step-{index:06d}"


def index_of(checkpoint: Path) -> int:
    """The optimizer step at which ``checkpoint`` resumes."""
    return int(_NAME.match(checkpoint.name).group(1))


def write_manifest(checkpoint: Path, extra: dict[str, Any]) -> None:
    """Declare ``checkpoint`` complete. Its files are forced to disk and hashed first.

    ``extra``: further JSON-able facts to keep in the manifest.
    """
    files = {
        file.relative_to(checkpoint).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": _hash(file, sync=True),
        }
        for file in _files(checkpoint)
    }
    for entry in [checkpoint.parent, checkpoint, *checkpoint.rglob("*")]:
        if entry.is_dir():
            sync_folder(entry)
    store_manifest(checkpoint, extra | {"format": _FORMAT, "files": files})


def store_manifest(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest``, which may be a changed form of another one, with a hash of itself as seal."""
    facts = {name: value for name, value in manifest.items() if name != "seal"}
    sealed = facts | {"seal": _seal(facts)}
    write_durably(checkpoint / MANIFEST, json.dumps(sealed, indent=1).encode())


def verify(checkpoint: Path, *, contents: bool = True) -> dict[str, Any]:
    """The manifest of a complete, undamaged checkpoint. Raises CheckpointError with the file at fault.

    Without ``contents`` names and sizes alone are compared: for a rank that loads what was verified before.
    A file that the manifest does not list does no harm.
    """
    manifest = _manifest(checkpoint)
    for name, expected in manifest["files"].items():
        file = checkpoint / name
        try:
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                raise CheckpointError(f"{file} is missing")
            same = size == expected["bytes"] and (not contents or _hash(file) == expected["sha256"])
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        if not same:
            raise CheckpointError(f"{file} is damaged: its content is not what {MANIFEST} lists")
    return manifest


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """What ``checkpoint`` says of itself, as it was written."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it was never finished") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it is no JSON") from None
    if not isinstance(manifest, dict) or manifest.pop("seal", "") != _seal(manifest):
        raise CheckpointError(f"{path} is damaged: it is not what was written")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{checkpoint} has format {manifest['format']}, not {_FORMAT}")
    if manifest.get("index", index_of(checkpoint)) != index_of(checkpoint):
        raise CheckpointError(f"{path} is that of optimizer step {manifest['index']}, not of this folder")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def newest(path: Path) -> Path | None:
    """The newest checkpoint under ``path`` that can be used; those passed over are named in a warning."""
    for checkpoint in reversed(_all(path)):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            log.warning("passing over a checkpoint: %s", error)
        else:
            return checkpoint
    return None


def prune(path: Path, keep: int, keep_every: int | None = None) -> None:
    """Delete what is older than the ``keep`` newest complete checkpoints: unfinished and damaged ones too.

    Complete ones at a multiple of ``keep_every`` optimizer steps stay.
    """
    complete = [checkpoint for checkpoint in _all(path) if (checkpoint / MANIFEST).is_file()]
    if len(complete) < keep:
        return
    oldest_kept = index_of(complete[-keep])
    for_good = {one for one in complete if keep_every and index_of(one) % keep_every == 0}
    for checkpoint in [*_all(path), *_all(path, _DAMAGED_NAME)]:
        if index_of(checkpoint) < oldest_kept and checkpoint not in for_good:
            _delete(checkpoint)


def set_aside(path: Path, index: int) -> list[Path]:
    """Leave no checkpoint under ``path`` beyond optimizer step ``index``, where the run goes on.

    What was passed over there must not count as newer than what the run saves from now on. The unfinished are
    deleted, the others renamed: something may be left in them. Returns what the latter are called now.
    """
    renamed = []
    for checkpoint in _all(path):
        if index_of(checkpoint) <= index:
            continue
        if not (checkpoint / MANIFEST).is_file():
            _delete(checkpoint)
            continue
        damaged = checkpoint.with_name(f"{checkpoint.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)  # of an earlier attempt
        renamed.append(checkpoint.rename(damaged))
        log.warning("%s cannot be used and is now called %s", checkpoint, damaged.name)
    return renamed


def sync_folder(path: Path) -> None:
    """Make what was created or renamed in ``path`` outlast a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(checkpoint: Path) -> None:
    """Manifest first, so that half a folder never counts. Somebody else may delete it meanwhile."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(checkpoint)


def _all(path: Path, name: re.Pattern[str] = _NAME) -> list[Path]:
    """Every checkpoint folder with such a name, finished or not, oldest first."""
    if not path.is_dir():
        return []
    return sorted((entry for entry in path.iterdir() if name.fullmatch(entry.name)), key=index_of)


def _files(checkpoint: Path) -> Iterator[Path]:
    for entry in sorted(checkpoint.rglob("*")):
        if entry.is_file() and entry != checkpoint / MANIFEST:
            yield entry


def _hash(file: Path, *, sync: bool = False) -> str:
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
