"""The books of a run as an auditor sees them: read beside a run that goes on, never written.

The orchestrator's journal says what became of every rollout; the trainer's ledger, kept by its ranks on their
own and part of every checkpoint, says what they stepped on.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunError, RunFolder

_LIVE = "the live journal"
_COPY_LIMIT = 20.0
"""Seconds within which a journal that is being written must be copied whole."""
_CHECKPOINT = re.compile(r"step-(\d+)(\.damaged)?")
_WAL_SALTS = slice(16, 24)
"""In the header of SQLite's log: changed whenever the log begins anew."""


@dataclass(frozen=True)
class GroupRow:
    id: int
    stage: str
    number: int
    environment: str
    size: int


@dataclass(frozen=True)
class RolloutRow:
    group: int
    number: int
    state: str
    batch: int | None
    sampled: int | None
    reason: str | None
    finished_at: float | None

    @property
    def id(self) -> str:
        return f"{self.group}-{self.number}"


@dataclass(frozen=True)
class BatchRow:
    id: int
    step: int
    stage: str
    stage_step: int
    kind: str
    state: str
    applied_at: float | None
    packed_tokens: int | None
    incarnation: int | None


@dataclass(frozen=True)
class Books:
    """The journal at one moment. ``source`` says which copy of it this is."""

    source: str
    groups: dict[int, GroupRow]
    rollouts: list[RolloutRow]
    batches: list[BatchRow]

    @property
    def live(self) -> bool:
        """Whether this is the run's own journal, which is never behind what the run tells of its steps."""
        return self.source == _LIVE

    @property
    def applied(self) -> list[BatchRow]:
        """The optimizer steps that were taken, in order."""
        return [batch for batch in self.batches if batch.state != "batched"]


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: what one rank stepped on. ``documents``: their names and prompts' hashes."""

    index: int
    step: int
    stage: str
    incarnation: int
    documents: list[tuple[str, str]]


@dataclass(frozen=True)
class Checkpoint:
    """One folder of the run's checkpoints; ``problem`` is empty where it is whole."""

    path: Path
    index: int
    problem: str

    @property
    def name(self) -> str:
        return self.path.name


def read_books(run: RunFolder, known: list[Checkpoint]) -> Books:
    """The live journal, or where it is gone the snapshot of the newest whole one of ``known``.

    Raises RunError where there is neither.
    """
    journal = run.journal / "journal.sqlite"
    problem = f"{journal} is not there"
    if journal.exists():
        try:
            return _read(journal, _LIVE)
        except (OSError, sqlite3.Error) as error:
            problem = f"{journal} cannot be read: {error}"
    if (newest := newest_whole(known)) is not None:
        snapshot = newest.path / checkpoints.BOOKS / "journal.sqlite"
        return _read(snapshot, f"the snapshot of {newest.name}")
    raise RunError(
        f"run {run.id} has no books to audit: {problem}, and there is no whole checkpoint; "
        f"how far it came: `stackrl status {run.id}`"
    )


def read_checkpoints(folder: Path, *, contents: bool = True) -> list[Checkpoint]:
    """Every checkpoint in ``folder``, also those set aside, oldest first; with ``contents`` all is hashed."""
    found = []
    for path, index in _folders(folder):
        try:
            checkpoints.verify(path, contents=contents)
        except (checkpoints.CheckpointError, OSError) as error:
            if not path.is_dir():  # the run goes on and has pruned it
                continue
            problem = str(error)
        else:
            problem = "it was set aside" if path.suffix else ""
        found.append(Checkpoint(path, index, problem))
    return found


def newest_whole(known: list[Checkpoint]) -> Checkpoint | None:
    return next((checkpoint for checkpoint in reversed(known) if not checkpoint.problem), None)


def read_ledger(checkpoint: Checkpoint) -> list[Entry]:
    """All lines of all ranks, by step. Empty where the checkpoint has no ledger."""
    entries = []
    for file in sorted((checkpoint.path / "trainer").glob("ledger-*.jsonl")):
        for line in file.read_text().splitlines():
            written = json.loads(line)
            documents = [(name, prompt) for name, prompt in written["documents"]]
            entries.append(
                Entry(written["index"], written["step"], written["stage"], written["incarnation"], documents)
            )
    return sorted(entries, key=lambda entry: entry.index)


def _folders(folder: Path) -> list[tuple[Path, int]]:
    paths = folder.glob("step-*") if folder.is_dir() else ()
    named = [(path, _CHECKPOINT.fullmatch(path.name)) for path in paths]
    return sorted(((path, int(match[1])) for path, match in named if match), key=lambda pair: pair[1])


@contextlib.contextmanager
def copied(database: Path) -> Iterator[Path]:
    """A private copy of a SQLite database that somebody else may be writing, as of one moment.

    The log is copied after the database, so that it holds every page that a checkpoint of SQLite's may have
    moved meanwhile; where it began anew in between, both are copied again. Raises TimeoutError.
    """
    log = database.with_name(f"{database.name}-wal")
    deadline = time.monotonic() + _COPY_LIMIT
    with tempfile.TemporaryDirectory(prefix="stackrl-audit-") as folder:
        copy = Path(folder) / "journal.sqlite"
        copy_of_log = copy.with_name(f"{copy.name}-wal")
        while True:
            before = _age(database, log)
            shutil.copyfile(database, copy)
            copy_of_log.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(log, copy_of_log)
            if before == _age(database, log) and before[0] == _salts(copy_of_log):
                yield copy
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{database} changed faster than it could be copied")
            time.sleep(0.05)


def _age(database: Path, log: Path) -> tuple[bytes, object]:
    """What changes when pages go from the log into the database for good: the log's salts and, where there
    is no log, the database itself."""
    salts, status = _salts(log), database.stat()
    return salts, (status.st_ino, () if salts else (status.st_size, status.st_mtime_ns))


def _salts(log: Path) -> bytes:
    try:
        with open(log, "rb") as file:
            return file.read(32)[_WAL_SALTS]
    except FileNotFoundError:
        return b""


def _read(database: Path, source: str) -> Books:
    with copied(database) as copy, contextlib.closing(sqlite3.connect(copy)) as db:
        groups = db.execute("SELECT id, stage, number, environment, size FROM groups ORDER BY id").fetchall()
        rollouts = db.execute(
            "SELECT group_id, number, state, batch, sampled, reason, finished_at FROM rollouts "
            "ORDER BY group_id, number"
        ).fetchall()
        batches = db.execute(
            "SELECT id, step, stage, stage_step, kind, state, applied_at, packed_tokens, incarnation "
            "FROM batches ORDER BY id"
        ).fetchall()
    return Books(
        source,
        {row[0]: GroupRow(*row) for row in groups},
        [RolloutRow(*row) for row in rollouts],
        [BatchRow(*row) for row in batches],
    )
