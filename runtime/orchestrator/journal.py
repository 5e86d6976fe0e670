"""The books of a run: what became of every rollout, so that none is lost and none is trained twice.

    planned → finished → batched → applied → durable          or dropped, with the reason

The journal is a SQLite database (WAL) in ``journal/journal.sqlite``; the arrays of a finished rollout lie in
a file of their own in ``journal/rollouts/`` (arrays.py) until a checkpoint has made it durable. A snapshot of
the database goes into every checkpoint.

The journal says of which incarnation it is. Opened by the same one, it is simply gone on with: only the
orchestrator was restarted. Opened by another one it becomes a copy of the checkpoint's snapshot, or empty:
what came after the cut is planned anew, which gives the same groups, prompts and seeds (rollback.py).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stackrl.runtime.orchestrator import rollback
from stackrl.runtime.orchestrator.arrays import Arrays
from stackrl.runtime.orchestrator.batching import Place
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.groups import FinishedGroup, Plan, Rollout, rollout_id
from stackrl.runtime.orchestrator.writer import Writer
from stackrl.runtime.transport.messages import MessageError

_NAME = "journal.sqlite"
_KEPT = ("finished", "batched", "applied")
"""States of rollouts whose arrays may be needed again."""


class JournalError(OrchestratorError):
    """Something was to happen to a rollout or a batch that its state does not allow, or the disk refused."""


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


@dataclass(frozen=True)
class SealedBatch:
    """A batch as it was sealed. ``record``: the metrics that were known then."""

    index: int
    step: int
    stage: str
    stage_step: int
    kind: str
    record: dict[str, Any]
    groups: Sequence[FinishedGroup]
    """By id, their rollouts by number: the order in which every batch is built."""


def is_of(folder: Path, incarnation: int) -> bool:
    """Whether ``folder``'s journal is gone on with by this incarnation: its orchestrator was restarted.

    Raises JournalError where the disk refuses.
    """
    with _disk(folder / _NAME, "be opened"):
        return rollback.incarnation_of(folder / _NAME) == incarnation


class Journal:
    """The journal in ``folder``, opened by ``incarnation``, which starts from ``snapshot`` or empty.

    ``recipes``: RL stage → what its rollouts are made from now (recipes.py).
    """

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        snapshot: Path | None = None,
        recipes: Mapping[str, str] | None = None,
    ) -> None:
        self.changed: Mapping[str, int] = {}
        """Rollouts that were dropped on opening, by stage: what they were made from has changed."""
        self._file = folder / _NAME
        self._changing = threading.RLock()
        """Held by the thread that has a transaction."""
        self._together = False
        """Whether that transaction is of several changes."""
        self._to_delete: list[tuple[int, int]] = []
        """Rollouts whose arrays are let go once that transaction is on disk."""
        self._writer = Writer(self.together)
        with self._disk("be opened"):
            self._arrays = Arrays(folder / "rollouts")
            if not is_of(folder, incarnation):
                self.changed = rollback.replace(self._file, snapshot, incarnation, recipes or {})
            self._db = sqlite3.connect(self._file, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._plan_again_what_is_unreadable()
            self._arrays.delete_all_but(self._ids(_KEPT))

    def close(self) -> None:
        self._writer.close()
        self._db.close()

    async def write(self, change: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """``change``, a method of this journal, beside the event loop. It is on disk when this returns.

        Raises what it raises; also what one raises that was made in the same transaction, which is then not
        made either.
        """
        await self._writer.make(partial(change, *arguments, **named))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All changes within are made at once, or none of them."""
        with self._changing:
            self._to_delete.clear()
            with self._writing("make several changes"):
                self._together = True
                try:
                    yield
                finally:
                    self._together = False
            self._delete_arrays(self._to_delete)

    def plan(self, group: Plan) -> None:
        """A new group, all of its rollouts planned."""
        with self._writing(f"plan group {group.id}"):
            self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", astuple(group))
            self._db.executemany(
                "INSERT INTO rollouts (group_id, number) VALUES (?, ?)",
                [(group.id, number) for number in range(group.size)],
            )

    def plan_all(self, groups: Sequence[Plan]) -> None:
        """New groups."""
        with self.together():
            for group in groups:
                self.plan(group)

    def finish(self, rollout: Rollout) -> None:
        """A rollout and its arrays. The file is whole before the state says so."""
        with self._writing(f"finish rollout {rollout.id}"):
            self._arrays.write(rollout)
            self._change(
                "state = 'finished', reward = ?, sampled = ?, finished_at = ?",
                "state = 'planned' AND group_id = ? AND number = ?",
                (rollout.reward, rollout.sampled, time.time(), rollout.group, rollout.number),
                f"rollout {rollout.id} finished",
            )

    def drop_rollout(self, group: int, number: int, reason: str) -> None:
        """A rollout that failed; its group goes on without it."""
        name = rollout_id(group, number)
        with self._writing(f"drop rollout {name}"):
            self._change(
                "state = 'dropped', reason = ?",
                "state = 'planned' AND group_id = ? AND number = ?",
                (reason, group, number),
                f"rollout {name} dropped",
            )

    def drop_group(self, group: int, reason: str) -> None:
        """What is left of a group that no batch will hold."""
        with self._writing(f"drop group {group}"):
            rows = self._db.execute(
                "UPDATE rollouts SET state = 'dropped', reason = ? "
                "WHERE group_id = ? AND state IN ('planned', 'finished') RETURNING group_id, number",
                (reason, group),
            ).fetchall()
        self._delete_arrays(rows)

    def seal(
        self,
        place: Place,
        kind: str,
        groups: Sequence[int],
        *,
        tokens: int = 0,
        record: dict[str, Any] | None = None,
    ) -> None:
        """Batch ``place.index`` holds the finished rollouts of ``groups``.

        ``kind`` is the stage's type, ``tokens`` how many its sequences have, prompts included, ``record``
        what is known of the step.
        """
        with self._writing(f"seal batch {place.index}"):
            self._db.execute(
                "INSERT INTO batches (id, step, stage, stage_step, kind, incarnation, packed_tokens, "
                "record, sealed_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    place.index,
                    place.step,
                    place.stage,
                    place.stage_step,
                    kind,
                    place.incarnation,
                    tokens,
                    json.dumps(record or {}),
                    time.time(),
                ),
            )
            for group in groups:
                self._change(
                    "state = 'batched', batch = ?",
                    "state = 'finished' AND group_id = ?",
                    (place.index, group),
                    f"group {group} batched",
                )

    def sealed(self) -> SealedBatch | None:
        """The batch that was sealed and is not known to be applied."""
        return self._batch("state = 'batched'", with_groups=True)

    def batch(self, index: int) -> SealedBatch | None:
        """Batch ``index`` as it was sealed, without its groups."""
        return self._batch(f"id = {int(index)}", with_groups=False)

    def record_before(self, index: int) -> dict[str, Any]:
        """What is known of the newest batch of RL before ``index``; empty where there is none."""
        row = self._db.execute(
            "SELECT record FROM batches WHERE kind = 'rl' AND id < ? ORDER BY id DESC LIMIT 1", (index,)
        ).fetchone()
        return json.loads(row[0]) if row else {}

    def apply(self, index: int) -> None:
        """The trainer stepped on batch ``index``."""
        with self._writing(f"apply batch {index}"):
            self._move_batches("applied", "batched", f"id = {int(index)}")
            self._db.execute("UPDATE batches SET applied_at = ? WHERE id = ?", (time.time(), index))
            self._db.execute(
                "UPDATE rollouts SET state = 'applied' WHERE state = 'batched' AND batch = ?", (index,)
            )

    def make_durable(self, index: int) -> None:
        """Batches up to ``index`` are part of a complete checkpoint; their arrays are needed no more.

        Nothing happens where they are known to be."""
        if self._one("SELECT COUNT(*) FROM batches WHERE id = ? AND state = 'durable'", index):
            return
        with self._writing(f"make batch {index} durable"):
            self._move_batches("durable", "applied", f"id <= {int(index)}")
            rows = self._db.execute(
                "UPDATE rollouts SET state = 'durable' WHERE state = 'applied' AND batch <= ? "
                "RETURNING group_id, number",
                (index,),
            ).fetchall()
        self._delete_arrays(rows)

    def snapshot(self, path: Path) -> None:
        """Copy the database to the file ``path``, whatever is being written."""
        with self._changing, self._disk(f"copy it to {path}"):
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
            finished=[self._arrays.read(rollout_id(plan.id, number)) for number in finished],
            planned=[number for number, state in states.items() if state == "planned"],
        )

    def _batch(self, which: str, *, with_groups: bool) -> SealedBatch | None:
        row = self._db.execute(
            f"SELECT id, step, stage, stage_step, kind, record FROM batches WHERE {which}"
        ).fetchone()
        if row is None:
            return None
        *facts, record = row
        return SealedBatch(*facts, json.loads(record), self._groups_of(row[0]) if with_groups else ())

    def _groups_of(self, batch: int) -> list[FinishedGroup]:
        rows = self._db.execute(
            "SELECT DISTINCT groups.* FROM groups JOIN rollouts ON groups.id = group_id "
            "WHERE batch = ? ORDER BY id",
            (batch,),
        ).fetchall()
        return [FinishedGroup(plan, self._rollouts(batch, plan)) for plan in (Plan(*row) for row in rows)]

    def _rollouts(self, batch: int, plan: Plan) -> list[Rollout]:
        numbers = self._db.execute(
            "SELECT number FROM rollouts WHERE batch = ? AND group_id = ? ORDER BY number", (batch, plan.id)
        ).fetchall()
        with self._disk(f"read the rollouts of group {plan.id}, which batch {batch} holds"):
            return [self._arrays.read(rollout_id(plan.id, number)) for (number,) in numbers]

    def _plan_again_what_is_unreadable(self) -> None:
        """A finished rollout whose arrays are missing or damaged is done once more."""
        lost = [rollout.split("-") for rollout in self._ids(["finished"]) if not self._arrays.holds(rollout)]
        with self._db:
            self._db.executemany(
                "UPDATE rollouts SET state = 'planned', reward = NULL, sampled = NULL, finished_at = NULL "
                "WHERE group_id = ? AND number = ?",
                lost,
            )

    def _ids(self, states: Sequence[str]) -> list[str]:
        """The rollouts in ``states``."""
        marks = ", ".join("?" * len(states))
        rows = self._db.execute(f"SELECT group_id, number FROM rollouts WHERE state IN ({marks})", states)
        return [rollout_id(*row) for row in rows]

    def _delete_arrays(self, rows: Sequence[tuple[int, int]]) -> None:
        """Of rollouts given by group and number."""
        if self._together:
            self._to_delete += rows
            return
        with self._disk("delete the arrays of rollouts"):
            self._arrays.delete(rollout_id(*row) for row in rows)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """One change of the books: on disk when this is left, or not made at all."""
        with self._changing, self._disk(what):
            if self._together:
                yield
                return
            with self._db:
                yield

    def _disk(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _disk(self._file, what)

    def _change(self, change: str, condition: str, values: tuple, what: str) -> None:
        if not self._db.execute(f"UPDATE rollouts SET {change} WHERE {condition}", values).rowcount:
            raise JournalError(f"{what}, which its state in the journal does not allow")

    def _move_batches(self, state: str, before: str, which: str) -> None:
        sql = f"UPDATE batches SET state = ? WHERE state = ? AND {which}"
        if not self._db.execute(sql, (state, before)).rowcount:
            raise JournalError(f"no batch with {which} is {before}, to become {state}")

    def _one(self, sql: str, *values: object) -> int:
        return self._db.execute(sql, values).fetchone()[0]


@contextlib.contextmanager
def _disk(file: Path, what: str) -> Iterator[None]:
    """Turn what the disk refuses to do for ``what`` into words."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except (sqlite3.Error, OSError, MessageError) as error:
        raise JournalError(
            f"the journal {file} could not {what}: {error}; "
            f"see `df {file.parent}` and `ls -l {file.parent}`: is the disk full or read-only?"
        ) from error
