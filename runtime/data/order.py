"""Which rows a step learns: a function of the seed, the stage and the step, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from stackrl.runtime.orchestrator.seeds import Seeds


class Order:
    """Epoch after epoch of ``rows``, each in an order of its own, or always in the same."""

    def __init__(self, rows: Sequence[int] | np.ndarray, seeds: Seeds, *, shuffle: bool) -> None:
        self._rows, self._seeds, self._shuffle = np.asarray(rows), seeds, shuffle
        self._epoch = lru_cache(maxsize=2)(self._ordered)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def between(self, start: int, end: int) -> list[int]:
        """The rows from place ``start`` (inclusive) to ``end`` (exclusive) of the endless succession."""
        return [int(self._epoch(place // len(self))[place % len(self)]) for place in range(start, end)]

    def _ordered(self, epoch: int) -> np.ndarray:
        return permuted(self._rows, self._seeds.branch("epoch", epoch)) if self._shuffle else self._rows


def permuted(rows: np.ndarray, seeds: Seeds) -> np.ndarray:
    """``rows`` in an order that is the same under every version of numpy, which promises that for
    RandomState alone."""
    number = seeds.number()
    return np.random.RandomState([number & 0xFFFFFFFF, number >> 32]).permutation(rows)


def held_out(rows: int, share: float, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn and rows to hold out, at least one of each where there are two; both sorted."""
    order = permuted(np.arange(rows), seeds.branch("held out"))
    out = held_out_count(rows, share)
    return np.sort(order[out:]), np.sort(order[:out])


def held_out_count(rows: int, share: float) -> int:
    """How many of ``rows`` are held out."""
    return min(max(1, round(share * rows)), rows - 1)


def steps_of(rows: int, epochs: float, batch_size: int) -> int:
    """Steps in which ``rows`` are learnt ``epochs`` times."""
    return max(1, -(-places_of(rows, epochs) // batch_size))


def places_of(rows: int, epochs: float) -> int:
    """Rows that ``epochs`` are, repetitions counted; at least one."""
    return max(1, round(epochs * rows))
