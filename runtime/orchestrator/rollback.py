"""A journal as an incarnation begins it: the cut of its checkpoint, or empty.

What the cut holds of groups that no batch has yet is gone on with, unless the stack has changed since and
with it what they are made from.

It is made beside the old one and takes its place in one move, so that a process that is killed meanwhile
leaves the old journal or none, and the next one rolls back again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

_FORMAT = 3
"""Of the tables below, kept as SQLite's user_version."""
_SCHEMA = """
CREATE TABLE meta (incarnation INTEGER NOT NULL, recipes TEXT NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL, number INTEGER NOT NULL, environment TEXT NOT NULL,
    admitted INTEGER NOT NULL, size INTEGER NOT NULL, UNIQUE (stage, number)
);
CREATE TABLE rollouts (
    group_id INTEGER NOT NULL REFERENCES groups, number INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'planned'
        CHECK (state IN ('planned', 'finished', 'batched', 'applied', 'durable', 'dropped')),
    batch INTEGER REFERENCES batches, reward REAL, sampled INTEGER, reason TEXT, finished_at REAL,
    PRIMARY KEY (group_id, number)
) WITHOUT ROWID;
CREATE INDEX rollouts_by_state ON rollouts (state);
CREATE INDEX rollouts_by_batch ON rollouts (batch);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, stage TEXT NOT NULL, stage_step INTEGER NOT NULL,
    kind TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'batched', incarnation INTEGER NOT NULL,
    packed_tokens INTEGER NOT NULL, record TEXT NOT NULL, sealed_at REAL NOT NULL, applied_at REAL
);
"""

CHANGED = "changed: it was made from other prompts, sampling or group size than the stage has now"
"""Why the books drop what was done of an open group."""

log = logging.getLogger(__name__)


def incarnation_of(journal: Path) -> int | None:
    """Whose journal the file is; None where there is none or it is damaged, so that it must be replaced.

    Raises sqlite3.OperationalError where the disk refuses.
    """
    if not journal.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(journal)) as db:
            if db.execute("PRAGMA user_version").fetchone() != (_FORMAT,):
                return None
            return db.execute("SELECT incarnation FROM meta").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        log.warning("the journal %s cannot be read: %s", journal, error)
        return None


def replace(
    journal: Path, snapshot: Path | None, incarnation: int, recipes: Mapping[str, str]
) -> dict[str, int]:
    """Put ``incarnation``'s journal in the place of the one at ``journal``: ``snapshot``'s, or empty.

    ``recipes``: RL stage → what its rollouts are made from now. Open groups of a stage that had another one
    are dropped; returns how many rollouts of each such stage.
    """
    made = journal.with_name("journal.new")
    made.unlink(missing_ok=True)
    os.close(os.open(made, os.O_CREAT | os.O_EXCL, 0o600))
    dropped = {}
    with contextlib.closing(sqlite3.connect(made)) as db:
        if snapshot is None:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {_FORMAT}")
        else:
            _copy(snapshot, db)
        with db:
            if snapshot is not None:
                unseal(db)
                dropped = drop_open(db, _changed(db, recipes), CHANGED)
            db.execute("DELETE FROM meta")
            db.execute("INSERT INTO meta VALUES (?, ?)", (incarnation, json.dumps(dict(recipes))))
    for suffix in ("-wal", "-shm", ""):
        journal.with_name(journal.name + suffix).unlink(missing_ok=True)
    os.replace(made, journal)
    return dropped


def unseal(db: sqlite3.Connection) -> None:
    """What was applied at the cut is part of the checkpoint; what was sealed was never trained on."""
    db.execute("UPDATE rollouts SET state = 'finished', batch = NULL WHERE state = 'batched'")
    db.execute("DELETE FROM batches WHERE state = 'batched'")
    db.execute("UPDATE batches SET state = 'durable'")
    db.execute("UPDATE rollouts SET state = 'durable' WHERE state = 'applied'")


def stages_of(db: sqlite3.Connection) -> list[str]:
    """The stages that have groups."""
    return [stage for (stage,) in db.execute("SELECT DISTINCT stage FROM groups")]


def drop_open(db: sqlite3.Connection, stages: Iterable[str], reason: str) -> dict[str, int]:
    """Drop the rollouts of ``stages`` that no batch holds; how many of each stage, where there were any."""
    dropped = {
        stage: db.execute(
            "UPDATE rollouts SET state = 'dropped', reason = ? WHERE state IN ('planned', 'finished') "
            "AND group_id IN (SELECT id FROM groups WHERE stage = ?)",
            (reason, stage),
        ).rowcount
        for stage in stages
    }
    return {stage: count for stage, count in dropped.items() if count}


def _changed(db: sqlite3.Connection, recipes: Mapping[str, str]) -> list[str]:
    [before] = db.execute("SELECT recipes FROM meta").fetchone()
    was = json.loads(before)
    return [stage for stage in stages_of(db) if was.get(stage) != recipes.get(stage)]


def _copy(snapshot: Path, db: sqlite3.Connection) -> None:
    with contextlib.closing(sqlite3.connect(f"{snapshot.resolve().as_uri()}?mode=ro", uri=True)) as source:
        [version] = source.execute("PRAGMA user_version").fetchone()
        if version != _FORMAT:
            raise sqlite3.DatabaseError(
                f"{snapshot} has format {version}, not {_FORMAT}: another version of stackrl made it"
            )
        source.backup(db)
