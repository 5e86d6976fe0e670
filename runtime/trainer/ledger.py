"""Which documents the trainer learnt from: evidence beside the orchestrator's journal, for the audit.

Each rank writes a line of JSON for every batch that it applied:

    {"index": 7, "step": 5, "stage": "main", "incarnation": 2, "documents": [["12-3", "9f86d081884c7d65"], …]}

with the hash of each document's prompt; a supervised batch has none. A checkpoint holds the ledger of
everything that led to its weights, in `trainer/ledger-<rank>.jsonl` of each rank: what a trainer restores,
its rank 0 takes over, so that what was rolled back is in no ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stackrl.runtime.transport.messages import Batch, MicroBatch

PART = "trainer"
_PATTERN = "ledger-*.jsonl"


class Ledger:
    """One rank's, in memory: some 30 bytes for every document of the run."""

    def __init__(self, rank: int, inherited: bytes = b"") -> None:
        self.name = f"ledger-{rank}.jsonl"
        self._lines = bytearray(inherited)

    @classmethod
    def restored(cls, rank: int, checkpoint: Path | None) -> Ledger:
        """The ledger that goes on from ``checkpoint``: all of it is rank 0's, the others begin empty."""
        if checkpoint is None or rank:
            return cls(rank)
        return cls(rank, b"".join(file.read_bytes() for file in _files(checkpoint)))

    def add(self, batch: Batch, *, rl: bool) -> None:
        """Write down that ``batch`` was applied."""
        line = {
            "index": batch.index,
            "step": batch.step,
            "stage": batch.stage,
            "incarnation": batch.incarnation,
            "documents": [entry for micro in batch.micro_batches for entry in _entries(micro)] if rl else [],
        }
        self._lines += json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def content(self) -> bytes:
        """All lines so far."""
        return bytes(self._lines)


def read_ledger(checkpoint: Path) -> list[dict[str, Any]]:
    """Every line of every rank in ``checkpoint``. Raises ValueError for one that is no JSON."""
    return [json.loads(line) for file in _files(checkpoint) for line in file.read_bytes().splitlines()]


def prompt_hash(prompt: np.ndarray) -> str:
    """The first 16 hex digits of the SHA-256 of a prompt's tokens as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(prompt, "<i4")).hexdigest()[:16]


def _entries(micro: MicroBatch) -> Iterator[tuple[str, str]]:
    """Name and prompt hash of each document; the prompt is what comes before the first trained token."""
    ends = np.cumsum(micro.lengths)
    for name, start, end in zip(micro.documents, ends - micro.lengths, ends, strict=True):
        trained = np.flatnonzero(micro.loss_mask[start:end])
        first = start + trained[0] if len(trained) else end
        yield name, prompt_hash(micro.tokens[start:first])


def _files(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / PART).glob(_PATTERN))
