"""Faults of a transfer of weights: files in the run's folder, which the light trainer looks for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from stackrl.runtime.transport.store import Snapshot

SLOW, CORRUPT = "slow-transfers", "corrupt-transfer"
SLOW_SECONDS = 30.0
"""Between the first half of a version and the second."""


def install(run: Path) -> None:
    """While `slow-transfers` is there, a transfer stands still half-way; the one that finds
    `corrupt-transfer` takes it away and sends a wrong byte."""
    whole = Snapshot.pieces

    def faulty(self: Snapshot, offset: int) -> Iterator[memoryview]:
        for piece in whole(self, offset):
            half = len(piece) // 2
            yield piece[:half]
            until = time.monotonic() + SLOW_SECONDS
            while (run / SLOW).exists() and time.monotonic() < until:
                time.sleep(0.02)
            rest = bytearray(piece[half:])
            try:
                (run / CORRUPT).unlink()
                rest[0] ^= 1
            except FileNotFoundError:
                pass
            yield memoryview(rest)

    Snapshot.pieces = faulty
