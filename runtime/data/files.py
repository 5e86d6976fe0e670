"""Where a stage's rows stand: files, folders and patterns, read one row at a time."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

PARQUET = "pyarrow>=20,<27"
"""What reads Parquet, as in pyproject.toml."""
ENDINGS = (".jsonl", ".parquet")
_PARQUET_ROWS = 256
"""Rows of a Parquet file that are in memory at once."""
_SHOWN = 60


class DataError(Exception):
    """Rows that cannot be learnt from. The text says where they stand, what is wrong, and what to do."""


@dataclass(frozen=True)
class Row:
    """One row and where it stands: `chats.jsonl:12`, `chats.parquet, row 12`."""

    place: str
    values: dict[str, Any]


def find(paths: str | Sequence[str]) -> list[Path]:
    """The files that ``paths`` name, in this order; those of a folder or a pattern by name.

    Raises DataError where there are none, or one with an ending that nothing reads.
    """
    return [file for path in ([paths] if isinstance(paths, str) else paths) for file in _named(path)]


def count(files: Sequence[Path], limit: int | None = None) -> int:
    """Rows in ``files``, ``limit`` at most. Raises DataError where one cannot be read."""
    return sum(1 for _ in islice(_places(files), limit))


def read(files: Sequence[Path], limit: int | None = None) -> Iterator[Row]:
    """The rows, ``limit`` at most. Raises DataError with the place of what is no row."""
    return islice((row for file in files for row in _reader(file)(file)), limit)


def fingerprint(files: Sequence[Path]) -> str:
    """Changes with the files' contents and their order, not with their names."""
    digest = hashlib.sha256()
    for file in files:
        with _opened(file) as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _named(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        found = [place]
    elif place.is_dir():
        found = sorted(file for file in place.iterdir() if file.suffix in ENDINGS and file.is_file())
        if not found:
            raise DataError(f"the folder {place} has no file that ends in {' or '.join(ENDINGS)}")
    elif found := sorted(Path(match) for match in glob.glob(str(place), recursive=True)):
        found = [file for file in found if file.is_file()]
    if not found:
        pattern = any(sign in path for sign in "*?[")
        raise DataError(f"no file {'is like' if pattern else 'or folder is called'} {place.absolute()}")
    for file in found:
        if file.suffix not in ENDINGS:
            raise DataError(f"{file} ends in none of {', '.join(ENDINGS)}; convert it, or give it its ending")
    return found


def _reader(file: Path):
    return _parquet_rows if file.suffix == ".parquet" else _json_rows


def _places(files: Sequence[Path]) -> Iterator[int]:
    """A number for each row, without reading what is in it."""
    for file in files:
        if file.suffix == ".parquet":
            yield from range(_parquet(file).metadata.num_rows)
        else:
            yield from (number for number, _ in _lines(file))


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of every line that is not blank."""
    with _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


def _opened(file: Path):
    try:
        return open(file, "rb")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _json_rows(file: Path) -> Iterator[Row]:
    for number, line in _lines(file):
        place = f"{file}:{number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not JSON: {error}; every line is one object") from error
        if not isinstance(values, dict):
            raise DataError(f"{place}: a row is an object with keys, not {json.dumps(values)[:_SHOWN]}")
        yield Row(place, values)


def _parquet_rows(file: Path) -> Iterator[Row]:
    number = 0
    for batch in _parquet(file).iter_batches(batch_size=_PARQUET_ROWS):
        for values in batch.to_pylist():
            number += 1
            yield Row(f"{file}, row {number}", _without_nothing(values))


def _parquet(file: Path):
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{file} is a Parquet file, and pyarrow, which reads them, is not installed; "
            f"type `{sys.executable} -m pip install '{PARQUET}'`"
        ) from None
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error


def _without_nothing(value: Any) -> Any:
    """Columns give every row every key: those that a row does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nothing(inner) for inner in value]
    return value
