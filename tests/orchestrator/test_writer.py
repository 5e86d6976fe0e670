"""Changes of the books beside the event loop: on disk when the caller goes on, many in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from stackrl.runtime.orchestrator.groups import Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal, JournalError
from stackrl.runtime.orchestrator.writer import Writer
from stackrl.runtime.transport.messages import Sample, Span, Version


def plan(group: int) -> Plan:
    return Plan(group, "main", group, "reverse", admitted=0, size=2)


def rollout(group: int, number: int) -> Rollout:
    sample = Sample(
        rollout=f"{group}-{number}",
        group=group,
        environment="reverse",
        tokens=np.arange(2, dtype="<i4"),
        loss_mask=np.array([0, 1], dtype="|u1"),
        logprobs=np.zeros(2, dtype="<f4"),
        spans=[Span(1, 2, Version(1, 0))],
    )
    facts = {"reward": 0.5, "metrics": {}, "turns": 1, "sampled": 1, "prefix_breaks": 0}
    return Rollout(group=group, number=number, environment="reverse", samples=[sample], **facts)


@pytest.fixture
def journal(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path / "journal", incarnation=1)) as journal:
        yield journal


def on_disk(tmp_path: Path) -> dict[str, int]:
    """States of rollouts, as another process sees them."""
    with contextlib.closing(sqlite3.connect(tmp_path / "journal" / "journal.sqlite")) as db:
        return dict(db.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))


async def test_a_change_is_on_disk_when_the_caller_goes_on(journal, tmp_path):
    await journal.write(journal.plan_all, [plan(group) for group in range(3)])
    await journal.write(journal.finish, rollout(1, 0))
    assert on_disk(tmp_path)["finished"] == 1
    assert (tmp_path / "journal" / "rollouts" / "1-0.msgpack").exists()


async def test_what_is_asked_for_while_the_disk_is_busy_is_made_in_one_transaction():
    made, transactions, busy = [], [], threading.Event()

    @contextlib.contextmanager
    def together():
        transactions.append(len(made))
        yield

    def slow() -> None:
        made.append(0)
        assert busy.wait(20)

    writer = Writer(together)
    tasks = [asyncio.create_task(writer.make(slow))]
    async with asyncio.timeout(20):
        while not made:  # noqa: ASYNC110 (what it waits for happens in a thread)
            await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(writer.make(lambda n=n: made.append(n))) for n in range(1, 50)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks), "none is told before it is on disk"
    busy.set()
    await asyncio.gather(*tasks)
    writer.close()
    assert made == list(range(50)) and transactions == [1], "the other 49 at once"


async def test_one_that_cannot_be_made_takes_its_transaction_along(journal, tmp_path):
    await journal.write(journal.plan_all, [plan(0)])
    hold = journal._changing
    hold.acquire()  # so that all of these are made together
    first = asyncio.create_task(journal.write(journal.plan_all, [plan(1)]))
    await asyncio.sleep(0.05)
    others = [
        asyncio.create_task(journal.write(journal.finish, rollout(0, 0))),
        asyncio.create_task(journal.write(journal.finish, rollout(7, 0))),
    ]
    await asyncio.sleep(0.05)
    hold.release()
    await first
    results = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(result, JournalError) for result in results)
    assert "finished" not in on_disk(tmp_path)
    await journal.write(journal.finish, rollout(0, 0))
    assert on_disk(tmp_path)["finished"] == 1, "the journal is as usable as before"


async def test_arrays_stay_until_the_change_that_lets_them_go_is_on_disk(journal, tmp_path):
    await journal.write(journal.plan_all, [plan(0)])
    await journal.write(journal.finish, rollout(0, 0))
    file = tmp_path / "journal" / "rollouts" / "0-0.msgpack"
    with pytest.raises(RuntimeError), journal.together():
        journal.drop_group(0, "no_signal")
        assert file.exists()
        raise RuntimeError
    assert file.exists() and on_disk(tmp_path)["finished"] == 1
    await journal.write(journal.drop_group, 0, "no_signal")
    assert not file.exists() and "finished" not in on_disk(tmp_path)


async def test_closing_makes_what_was_asked_for(tmp_path):
    journal = Journal(tmp_path / "journal", incarnation=1)
    task = asyncio.create_task(journal.write(journal.plan_all, [plan(group) for group in range(20)]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.to_thread(journal.close)
    assert on_disk(tmp_path)["planned"] == 20 * plan(0).size
