"""Rollouts as they lie in a run's folder, a file per RL step: ``rollouts/step-000012.msgpack.gz``.

The number is the optimizer step's index. A file is a row of gzip members that each hold one message: what
the file is about, the rollouts, then the trainer's logprobs, rank by rank, as they came. It is replaced as a
whole, so that it is never half written; mode 600.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from stackrl.runtime.run import open_private

_LEVEL = 1
_GZIP = 31

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class About(msgspec.Struct, array_like=True):
    """The first member of a file: where its rollouts stand in the run, and how many there are."""

    index: int
    step: int
    stage: str
    rollouts: int


class KeptSpan(msgspec.Struct, array_like=True):
    """Tokens ``start`` to ``end`` (exclusive) were sampled from weights ``version``, such as ``2.41``."""

    start: int
    end: int
    version: str


class KeptSequence(msgspec.Struct, array_like=True):
    """One training sequence. ``tokens`` int32 [T], ``trained`` uint8 [T] and ``logprobs`` float32 [trained
    tokens] (the engine's) as little-endian bytes."""

    document: str
    tokens: bytes
    trained: bytes
    logprobs: bytes
    spans: list[KeptSpan]
    temperature: float


class KeptRollout(msgspec.Struct, array_like=True):
    """A rollout with the advantage that its tokens were trained with."""

    id: str
    group: int
    environment: str
    reward: float
    advantage: float
    metrics: dict[str, float]
    turns: int
    sampled: int
    sequences: list[KeptSequence]


class KeptLogprobs(msgspec.Struct, array_like=True):
    documents: list[str]
    lengths: bytes
    logprobs: bytes


@dataclass
class KeptStep:
    """What was kept of one RL step."""

    about: About
    rollouts: list[KeptRollout]
    logprobs: dict[str, np.ndarray] = field(default_factory=dict)
    """Document → the trainer's logprobs of its trained tokens, float32; where they came."""


def read_steps(folder: Path, newest: int | None = None) -> Iterator[KeptStep]:
    """What is kept in ``folder``, the newest step first, until ``newest`` rollouts were read (or all).

    A step is read as a whole. Files that go away meanwhile, or are damaged, are passed over with a warning.
    """
    left = newest
    for file in reversed(files(folder)):
        if left is not None and left <= 0:
            return
        try:
            step = _read(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", file, error)
            continue
        left = None if left is None else left - len(step.rollouts)
        yield step


def count_rollouts(folder: Path) -> int:
    """Rollouts that are kept in ``folder``."""
    total = 0
    for file in files(folder):
        try:
            total += read_about(file).rollouts
        except (OSError, ValueError):
            continue
    return total


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.msgpack.gz"))


def file_of(folder: Path, index: int) -> Path:
    return folder / f"step-{index:06}.msgpack.gz"


def index_of(file: Path) -> int:
    return int(file.name.removeprefix("step-").partition(".")[0])


def _read(file: Path) -> KeptStep:
    members = list(_members(file.read_bytes()))
    if len(members) < 2:
        raise ValueError("it ends early")
    about = _decoded(members[0], About)
    step = KeptStep(about, _decoded(members[1], list[KeptRollout]))
    for member in members[2:]:
        _take_logprobs(step, _decoded(member, KeptLogprobs))
    return step


def _take_logprobs(step: KeptStep, addition: KeptLogprobs) -> None:
    lengths = np.frombuffer(addition.lengths, dtype="<i4")
    parts = np.split(np.frombuffer(addition.logprobs, dtype="<f4"), np.cumsum(lengths)[:-1])
    step.logprobs.update(zip(addition.documents, parts, strict=True))


def read_about(file: Path) -> About:
    """Of a file, without reading the rest of it."""
    with open(file, "rb") as content:
        return _decoded(_unpacked(content.read(4096))[0], About)


def member(content: object) -> bytes:
    """One gzip member. The same content gives the same bytes."""
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
    return packer.compress(msgspec.msgpack.encode(content)) + packer.flush()


def _members(data: bytes) -> Iterator[bytes]:
    while data:
        content, data = _unpacked(data)
        yield content


def _unpacked(data: bytes) -> tuple[bytes, bytes]:
    """The first gzip member, and what follows it. Raises ValueError where there is none, or a part of one."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        content = unpacker.decompress(data)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("it ends early")
    return content, unpacker.unused_data


def _decoded(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def replace_file(file: Path, data: bytes) -> None:
    """Whole or not at all. It need not outlive a crash of the machine, so nothing waits for the disk."""
    temporary = file.with_name(f".{file.name}")
    with open(temporary, "wb", opener=open_private) as content:
        content.write(data)
    os.replace(temporary, file)
