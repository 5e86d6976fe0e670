"""A stage's rows as tokens on disk: made once, before the first step, then read row by row.

A folder in the run's own: `tokens.bin` (int32) and `learnt.bin` (uint8) of all sequences back to back,
`index.npz` with where sequences and rows end, and `facts.json`, written last: without it the store is made
anew. A run that goes on finds the rows it began with, whatever has become of the files.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stackrl.runtime.data.files import DataError, Row
from stackrl.runtime.data.rows import document
from stackrl.runtime.data.tokens import Tokenizing, Tokens
from stackrl.runtime.run import write_durably

_TELL_EVERY = 100
_FACTS, _INDEX, _TOKENS, _LEARNT = "facts.json", "index.npz", "tokens.bin", "learnt.bin"


class Halted(Exception):
    """A store was not finished, because that was not wanted any more."""


@dataclass(frozen=True)
class Facts:
    """What went into a store. ``fingerprint``: of the files."""

    rows: int
    """Rows that are learnt from."""
    dropped: int
    """Rows that had to be left out: too long."""
    sequences: int
    tokens: int
    learnt: int
    """Tokens that carry loss."""
    fingerprint: str


class Store:
    """The rows in ``folder``, read from disk when they are asked for. Raises OSError where it is no store."""

    def __init__(self, folder: Path) -> None:
        self.facts = Facts(**json.loads((folder / _FACTS).read_bytes()))
        self._tokens = np.memmap(folder / _TOKENS, dtype="<i4", mode="r")
        self._learnt = np.memmap(folder / _LEARNT, dtype="|u1", mode="r")
        with np.load(folder / _INDEX) as index:
            self._ends, self._rows = index["sequences"], index["rows"]

    @staticmethod
    def is_whole(folder: Path) -> bool:
        """Whether there is one."""
        return (folder / _FACTS).exists()

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def row(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids (int32 [T]) and what of them is learnt (uint8 [T]) of each sequence of a row."""
        first = self._rows[number - 1] if number else 0
        return [self._sequence(i) for i in range(first, self._rows[number])]

    def _sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self._ends[number - 1] if number else 0, self._ends[number])
        return np.array(self._tokens[part]), np.array(self._learnt[part])


def make_store(
    folder: Path,
    rows: Iterable[Row],
    tokenizing: Tokenizing,
    fingerprint: str,
    goes_on: Callable[[int], bool],
) -> None:
    """Tokenise ``rows`` into ``folder``; ``goes_on`` hears how many are done.

    Raises DataError at the first row that cannot be learnt from, or where nothing is left, and Halted where
    ``goes_on`` says no.
    """
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with open(partial / _TOKENS, "wb") as tokens, open(partial / _LEARNT, "wb") as learnt:
        writer = _Writer(tokens, learnt)
        for number, row in enumerate(rows):
            if number % _TELL_EVERY == 0 and not goes_on(number):
                raise Halted
            writer.add(tokenizing.sequences(document(row)))
    np.savez(partial / _INDEX, sequences=np.array(writer.ends), rows=np.array(writer.rows))
    facts = writer.facts(fingerprint)
    if not facts.rows:
        raise DataError(
            f"no row is left to learn from: {facts.dropped} are over trainer.sequence_length"
            if facts.dropped
            else "the files hold no rows"
        )
    write_durably(partial / _FACTS, json.dumps(asdict(facts)).encode())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


class _Writer:
    def __init__(self, tokens: BinaryIO, learnt: BinaryIO) -> None:
        self._tokens, self._learnt = tokens, learnt
        self.ends, self.rows = array("q"), array("q")
        """Tokens up to the end of each sequence, sequences up to the end of each row."""
        self._length = self._marked = self._dropped = 0

    def add(self, sequences: list[Tokens]) -> None:
        """One row."""
        if not sequences:
            self._dropped += 1
            return
        for tokens in sequences:
            self._tokens.write(np.array(tokens.ids, dtype="<i4"))
            self._learnt.write(np.array(tokens.mask, dtype="|u1"))
            self._length += len(tokens.ids)
            self._marked += sum(tokens.mask)
            self.ends.append(self._length)
        self.rows.append(len(self.ends))

    def facts(self, fingerprint: str) -> Facts:
        return Facts(len(self.rows), self._dropped, len(self.ends), self._length, self._marked, fingerprint)
