"""The books of a run: what became of every rollout, so that none is lost and none is trained twice.

    planned → finished → batched → applied → durable          or dropped, with the reason

The journal is a SQLite database (WAL) in ``journal/journal.sqlite``; the arrays of a finished rollout lie in
a file of their own in ``journal/rollouts/`` until a checkpoint has made it durable. A snapshot of the
database goes into every checkpoint. A start takes the snapshot of the newest checkpoint as its journal, or
an empty one: what came after the cut is planned anew, which gives the same groups, prompts and seeds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.groups import Plan, Rollout, rollout_id
from stackrl.runtime.transport.messages import MessageError, decode, encode

_SCHEMA = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL, number INTEGER NOT NULL, environment TEXT NOT NULL,
    admitted INTEGER NOT NULL, size INTEGER NOT NULL, UNIQUE (stage, number)
);
CREATE TABLE rollouts (
    group_id INTEGER NOT NULL REFERENCES groups, number INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'planned'
        CHECK (state IN ('planned', 'finished', 'batched', 'applied', 'durable', 'dropped')),
    batch INTEGER REFERENCES batches, reward REAL, sampled INTEGER, reason TEXT,
    PRIMARY KEY (group_id, number)
) WITHOUT ROWID;
CREATE INDEX rollouts_by_state ON rollouts (state);
CREATE INDEX rollouts_by_batch ON rollouts (batch);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, stage TEXT NOT NULL, stage_step INTEGER NOT NULL,
    kind TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'batched'
);
"""

log = logging.getLogger(__name__)


class JournalError(Exception):
    """Something was to happen to a rollout or a batch that its state does not allow."""


@dataclass(frozen=True)
class Position:
    """Optimizer steps behind the run: all of them, those of RL, and those of each stage."""

    index: int
    step: int
    stage_steps: dict[str, int]


@dataclass(frozen=True)
class OpenGroup:
    """A group that no batch holds yet: its finished rollouts, and the numbers of those to be done."""

    plan: Plan
    finished: Sequence[Rollout]
    planned: Sequence[int]


class Journal:
    """Opens ``folder``'s journal as a copy of ``snapshot``, or empty. What was there before is replaced."""

    def __init__(self, folder: Path, snapshot: Path | None = None) -> None:
        self._arrays = folder / "rollouts"
        self._arrays.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = folder / "journal.sqlite"
        for suffix in ("", "-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        os.close(os.open(database, os.O_CREAT | os.O_EXCL, 0o600))
        self._db = sqlite3.connect(database)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        if snapshot is None:
            self._db.executescript(_SCHEMA)
        else:
            self._restore(snapshot)
        self._delete_arrays_except("finished")

    def close(self) -> None:
        self._db.close()

    def plan(self, group: Plan) -> None:
        """A new group, all of its rollouts planned."""
        with self._db:
            self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", astuple(group))
            self._db.executemany(
                "INSERT INTO rollouts (group_id, number) VALUES (?, ?)",
                [(group.id, number) for number in range(group.size)],
            )

    def finish(self, rollout: Rollout) -> None:
        """A rollout and its arrays. The file is whole before the state says so."""
        path = self._array_file(rollout.id)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(encode(rollout))
        os.replace(temporary, path)
        self._move(
            "state = 'finished', reward = ?, sampled = ?",
            "state = 'planned' AND group_id = ? AND number = ?",
            (rollout.reward, rollout.sampled, rollout.group, rollout.number),
            f"rollout {rollout.id} finished",
        )

    def drop_rollout(self, group: int, number: int, reason: str) -> None:
        """A rollout that failed; its group goes on without it."""
        self._move(
            "state = 'dropped', reason = ?",
            "state = 'planned' AND group_id = ? AND number = ?",
            (reason, group, number),
            f"rollout {rollout_id(group, number)} dropped",
        )

    def drop_group(self, group: int, reason: str) -> None:
        """What is left of a group that no batch will hold."""
        with self._db:
            rows = self._db.execute(
                "UPDATE rollouts SET state = 'dropped', reason = ? "
                "WHERE group_id = ? AND state IN ('planned', 'finished') RETURNING number",
                (reason, group),
            ).fetchall()
        self._delete_arrays(rollout_id(group, number) for (number,) in rows)

    def seal(self, place: Place, kind: str, groups: Sequence[int]) -> None:
        """Batch ``place.index`` holds the finished rollouts of ``groups``. ``kind`` is the stage's type."""
        with self._db:
            self._db.execute(
                "INSERT INTO batches (id, step, stage, stage_step, kind) VALUES (?, ?, ?, ?, ?)",
                (place.index, place.step, place.stage, place.stage_step, kind),
            )
            for group in groups:
                self._change(
                    "state = 'batched', batch = ?",
                    "state = 'finished' AND group_id = ?",
                    (place.index, group),
                    f"group {group} batched",
                )

    def apply(self, index: int) -> None:
        """The trainer stepped on batch ``index``."""
        with self._db:
            self._move_batches("applied", "batched", f"id = {int(index)}")
            self._db.execute(
                "UPDATE rollouts SET state = 'applied' WHERE state = 'batched' AND batch = ?", (index,)
            )

    def make_durable(self, index: int) -> None:
        """Batches up to ``index`` are part of a complete checkpoint; their arrays are needed no more."""
        with self._db:
            self._move_batches("durable", "applied", f"id <= {int(index)}")
            rows = self._db.execute(
                "UPDATE rollouts SET state = 'durable' WHERE state = 'applied' AND batch <= ? "
                "RETURNING group_id, number",
                (index,),
            ).fetchall()
        self._delete_arrays(rollout_id(*row) for row in rows)

    def snapshot(self, path: Path) -> None:
        """Copy the database to the file ``path``, whatever is being written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")

    def position(self) -> Position:
        """Counts the batches that were applied."""
        rows = self._db.execute(
            "SELECT stage, kind, COUNT(*) FROM batches WHERE state != 'batched' GROUP BY stage, kind"
        ).fetchall()
        return Position(
            index=sum(count for _, _, count in rows),
            step=sum(count for _, kind, count in rows if kind == "rl"),
            stage_steps={stage: count for stage, _, count in rows},
        )

    def next_group(self) -> int:
        return self._one("SELECT COALESCE(MAX(id) + 1, 0) FROM groups")

    def next_prompt(self, stage: str) -> int:
        return self._one("SELECT COALESCE(MAX(number) + 1, 0) FROM groups WHERE stage = ?", stage)

    def states(self) -> dict[str, int]:
        """Rollouts in each state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))

    def open_groups(self, stage: str) -> list[OpenGroup]:
        """Groups of ``stage`` with rollouts that are planned or finished, oldest first."""
        rows = self._db.execute(
            "SELECT DISTINCT groups.* FROM groups JOIN rollouts ON groups.id = group_id "
            "WHERE stage = ? AND state IN ('planned', 'finished') ORDER BY id",
            (stage,),
        ).fetchall()
        return [self._open_group(Plan(*row)) for row in rows]

    def _open_group(self, plan: Plan) -> OpenGroup:
        states = dict(
            self._db.execute("SELECT number, state FROM rollouts WHERE group_id = ?", (plan.id,)).fetchall()
        )
        finished = [number for number, state in states.items() if state == "finished"]
        return OpenGroup(
            plan=plan,
            finished=[self._read(rollout_id(plan.id, number)) for number in finished],
            planned=[number for number, state in states.items() if state == "planned"],
        )

    def _restore(self, snapshot: Path) -> None:
        """Take over ``snapshot``; a finished rollout whose arrays are missing or damaged is planned again."""
        with contextlib.closing(
            sqlite3.connect(f"{snapshot.resolve().as_uri()}?mode=ro", uri=True)
        ) as source:
            source.backup(self._db)
        self._db.execute("PRAGMA journal_mode = WAL")
        with self._db:
            self._db.execute("UPDATE batches SET state = 'durable'")
            self._db.execute("UPDATE rollouts SET state = 'durable' WHERE state = 'applied'")
            finished = self._db.execute(
                "SELECT group_id, number FROM rollouts WHERE state = 'finished'"
            ).fetchall()
            lost = [row for row in finished if not self._readable(rollout_id(*row))]
            self._db.executemany(
                "UPDATE rollouts SET state = 'planned', reward = NULL, sampled = NULL "
                "WHERE group_id = ? AND number = ?",
                lost,
            )

    def _readable(self, rollout: str) -> bool:
        try:
            return self._read(rollout).id == rollout
        except (OSError, MessageError) as error:
            log.warning("rollout %s is done again, its arrays are gone: %s", rollout, error)
            return False

    def _read(self, rollout: str) -> Rollout:
        return decode(self._array_file(rollout).read_bytes(), Rollout)

    def _array_file(self, rollout: str) -> Path:
        return self._arrays / f"{rollout}.msgpack"

    def _delete_arrays(self, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            self._array_file(rollout).unlink(missing_ok=True)

    def _delete_arrays_except(self, state: str) -> None:
        kept = self._db.execute("SELECT group_id, number FROM rollouts WHERE state = ?", (state,)).fetchall()
        keep = {self._array_file(rollout_id(*row)) for row in kept}
        for file in self._arrays.iterdir():
            if file not in keep:
                file.unlink()

    def _move(self, change: str, condition: str, values: tuple, what: str) -> None:
        with self._db:
            self._change(change, condition, values, what)

    def _change(self, change: str, condition: str, values: tuple, what: str) -> None:
        if not self._db.execute(f"UPDATE rollouts SET {change} WHERE {condition}", values).rowcount:
            raise JournalError(f"{what}, which its state in the journal does not allow")

    def _move_batches(self, state: str, before: str, which: str) -> None:
        sql = f"UPDATE batches SET state = ? WHERE state = ? AND {which}"
        if not self._db.execute(sql, (state, before)).rowcount:
            raise JournalError(f"no batch with {which} is {before}, to become {state}")

    def _one(self, sql: str, *values: object) -> int:
        return self._db.execute(sql, values).fetchone()[0]
