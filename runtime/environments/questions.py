"""The rows that tasks are drawn from: files here, or a data set of the Hugging Face Hub."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from stackrl.runtime.data import files
from stackrl.runtime.data.files import DataError, Row

CONVERTED = "refs/convert/parquet"
"""Where the Hub keeps every public data set as Parquet, whatever its own files are."""
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")

PROPERTIES: dict[str, Any] = {
    "subset": {
        "type": "string",
        "minLength": 1,
        "description": "Part of a data set of the Hub, where it has several.",
    },
    "split": {"type": "string", "minLength": 1, "description": "Split of a data set of the Hub."},
    "limit": {
        "type": "integer",
        "minimum": 1,
        "description": "Rows that are used, from the beginning; by default all.",
    },
}
"""Of the JSON Schemas of environments that have rows."""
DATASET = {
    "type": "string",
    "minLength": 1,
    "description": "A file (.jsonl or .parquet), a folder of such files, a pattern like `data/*.parquet`, or "
    "the name of a data set of the Hugging Face Hub, OWNER/NAME.",
}


def rows_of(
    dataset: str, subset: str = "default", split: str = "train", limit: int | None = None
) -> list[Row]:
    """The rows, at least one. Raises DataError with what is wrong and what to do.

    What is on the Hub is downloaded once, into its own cache; HF_HUB_OFFLINE=1 uses only what is there.
    """
    found = files.find(_downloaded(dataset, subset, split) if on_the_hub(dataset) else dataset)
    stamps = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in found)
    rows = _read(stamps, limit)
    if not rows:
        raise DataError(f"{dataset} has no rows")
    return rows


def on_the_hub(dataset: str) -> bool:
    """Whether ``dataset`` names one of the Hub rather than files here."""
    is_name = _ON_THE_HUB.fullmatch(dataset) and not dataset.endswith(files.ENDINGS)
    return bool(is_name) and not Path(dataset).expanduser().exists()


@lru_cache(maxsize=8)
def _read(stamps: tuple[tuple[Path, int, int], ...], limit: int | None) -> list[Row]:
    """Read once for all environments of a process that draw from the same files."""
    return list(files.read([file for file, _, _ in stamps], limit))


def _downloaded(name: str, subset: str, split: str) -> str:
    """The folder with the Parquet files of one split."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(
            f"{name} is on the Hugging Face Hub, and huggingface_hub, which fetches it, is not installed; "
            "it comes with `pip install -e '.[runtime]'`"
        ) from None
    try:
        snapshot = snapshot_download(
            name, repo_type="dataset", revision=CONVERTED, allow_patterns=[f"{subset}/{split}/*.parquet"]
        )
    except Exception as error:  # its many kinds all mean that the data set is not to be had
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the data set {name} cannot be fetched from the Hugging Face Hub: {first_line}; save it as "
            ".jsonl or .parquet and give the file's path instead"
        ) from error
    folder = Path(snapshot) / subset / split
    if not folder.is_dir():
        raise DataError(
            f"the data set {name} has no split {split!r} in subset {subset!r}"
            f"{_those_there_are(Path(snapshot), name)}"
        )
    return str(folder)


def _those_there_are(snapshot: Path, name: str) -> str:
    local = sorted(str(path.relative_to(snapshot)) for path in snapshot.glob("*/*") if path.is_dir())
    return f"; say subset and split as https://huggingface.co/datasets/{name} has them" + (
        f" (here are {', '.join(local)})" if local else ""
    )
