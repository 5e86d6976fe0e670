"""The trainer's loop against the real server of batches, with a learner that only counts."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from trainer_runs import TOKEN, make_batches, make_run, make_samples, make_stack

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer import loop as loop_module
from stackrl.runtime.trainer.ledger import Ledger, read_ledger
from stackrl.runtime.trainer.loop import Loop
from stackrl.runtime.trainer.protocol import Progress, Step
from stackrl.runtime.transport.batch_client import BatchClient
from stackrl.runtime.transport.batches import BatchServer, TransportError
from stackrl.runtime.transport.messages import Batch, Logprobs, Version

LIMIT = 20.0
RANKS = 2
START = Progress()
Start = Callable[..., "Trainer"]


class Counting:
    """Counts batches instead of learning from them; all ranks meet in every step."""

    def __init__(self, rank: int, meeting: threading.Barrier, progress: Progress = START) -> None:
        self.progress = progress
        self.source = "" if rank else "http://weights.invalid"
        self.published: list[Version] = []
        self.saved: list[str] = []
        self.on_disk = threading.Event()
        """A save takes until this is set."""
        self.on_disk.set()
        self.meeting = meeting
        self._saving: threading.Thread | None = None

    def apply(self, batch: Batch) -> Step:
        self.meeting.wait(LIMIT)
        rl = batch.stage == "main"
        self.progress = Progress(batch.index + 1, batch.step + rl, batch.stage)
        trained = sum(int(micro.loss_mask.sum()) for micro in batch.micro_batches)
        return Step({"loss": 0.5}, np.arange(trained, dtype="<f4") if batch.report else None)

    def publish(self, version: Version) -> dict[str, float]:
        self.published.append(version)
        return {"weight_bytes": 8.0}

    def save(self, checkpoint: Path, files: Mapping[str, bytes], done: Callable[[], None]) -> None:
        self.settle()
        self.saved.append(checkpoint.name)

        def write() -> None:
            self.on_disk.wait(LIMIT)
            (checkpoint / "trainer").mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (checkpoint / "trainer" / name).write_bytes(content)
            self.meeting.wait(LIMIT)
            done()

        self._saving = threading.Thread(target=write)
        self._saving.start()

    def settle(self) -> None:
        if self._saving:
            self._saving.join(LIMIT)


class Trainer:
    """All ranks, each with the real loop in a thread."""

    def __init__(self, run: RunFolder, progress: Progress = START) -> None:
        meeting = threading.Barrier(RANKS)
        self.learners = [Counting(rank, meeting, progress) for rank in range(RANKS)]
        self.loops = [
            Loop(run, run.stack(), learner, Ledger(rank), rank=rank, ranks=RANKS, token=TOKEN)
            for rank, learner in enumerate(self.learners)
        ]
        self.work = [asyncio.create_task(asyncio.to_thread(loop.until_end)) for loop in self.loops]

    def leave(self) -> None:
        """End what a failed test leaves behind."""
        self.learners[0].meeting.abort()
        for loop in self.loops:
            loop._client.close()

    async def reasons(self) -> list[str]:
        async with asyncio.timeout(LIMIT):
            return await asyncio.gather(*self.work)


@pytest.fixture
def start(run: RunFolder) -> Iterator[Callable[..., Trainer]]:
    """Starts all ranks of the trainer, from some progress."""
    started = []

    def begin(progress: Progress = START) -> Trainer:
        started.append(Trainer(run, progress))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.leave()


@asynccontextmanager
async def serving(run: RunFolder, index: int = 0, **options):
    server = BatchServer(run.endpoints().orchestrator, TOKEN, incarnation=1, index=index, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def batches(index: int, **changes) -> list[Batch]:
    stage = ("warmup", index) if index < 2 else ("main", index - 2)
    place = {"index": index, "step": max(0, index - 2), "stage": stage[0], "stage_step": stage[1]}
    return make_batches(make_samples(8, seed=index), RANKS, capacity=100, **place | changes)


async def take(server: BatchServer, index: int, **changes):
    await server.offer(batches(index, **changes))
    await server.fetched(LIMIT)
    return await server.applied(LIMIT)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(loop_module, "GREETING_EVERY", 0.2)
    return make_run(tmp_path, make_stack())


def part(run: RunFolder, index: int) -> Path:
    return checkpoints.folder(run.checkpoints(run.stack()), index)


async def test_batches_are_applied_published_and_written_down(run: RunFolder, start: Start) -> None:
    async with serving(run) as server:
        trainer = start()
        assert (await server.hello(LIMIT)).weights == "http://weights.invalid"
        acks = [await take(server, index, checkpoint=index == 2) for index in range(4)]
        await server.durable(2, LIMIT)
        await server.end("finished", LIMIT)
        assert await trainer.reasons() == ["finished"] * RANKS
    assert [ack.version for ack in acks] == [Version(1, 0), Version(1, 0), Version(1, 1), Version(1, 2)]
    assert {"loss", "seconds_wait", "seconds_step", "seconds_publish", "seconds_save"} <= acks[
        0
    ].metrics.keys()
    assert all(ack.metrics["weight_bytes"] == 8 for ack in acks if ack.version.step)
    for learner in trainer.learners:
        assert learner.published == [Version(1, 0), Version(1, 1), Version(1, 2)]
        assert learner.saved == ["step-000003"]
    lines = read_ledger(part(run, 3))
    assert sorted(line["index"] for line in lines) == [0, 0, 1, 1, 2, 2]
    assert {line["index"]: bool(line["documents"]) for line in lines} == {0: False, 1: False, 2: True}


async def test_training_goes_on_while_a_checkpoint_is_written(run: RunFolder, start: Start) -> None:
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        for learner in trainer.learners:
            learner.on_disk.clear()
        await take(server, 0, checkpoint=True)
        await take(server, 1)
        with pytest.raises(TransportError, match="did not acknowledge batch 0 as durable"):
            await server.durable(0, 0.5)
        for learner in trainer.learners:
            learner.on_disk.set()
        await server.durable(0, LIMIT)
        await server.end("finished", LIMIT)
        await trainer.reasons()
    assert {line["index"] for line in read_ledger(part(run, 1))} == {0}  # of the moment it was begun


@pytest.mark.parametrize("save", [True, False])
async def test_the_end_saves_what_is_there_where_it_is_told_to(
    run: RunFolder, start: Start, save: bool
) -> None:
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        await take(server, 0)
        await server.end("stopped", LIMIT, save=save)
        if save:
            await server.durable(0, LIMIT)
        assert await trainer.reasons() == ["stopped"] * RANKS
    assert trainer.learners[0].saved == (["step-000001"] if save else [])
    assert bool(read_ledger(part(run, 1))) is save


async def test_what_was_saved_or_restored_is_not_saved_again(run: RunFolder, start: Start) -> None:
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        await take(server, 0, checkpoint=True)
        await server.end("stopped", LIMIT, save=True)
        await server.durable(0, LIMIT)
        await trainer.reasons()
    assert trainer.learners[0].saved == ["step-000001"]
    async with serving(run, index=1) as server:
        trainer = start(Progress(1, 0, "warmup"))
        await server.hello(LIMIT)
        await server.end("stopped", LIMIT, save=True)
        await server.durable(0, LIMIT)
        await trainer.reasons()
    assert trainer.learners[0].saved == []


async def test_each_rank_reports_its_trained_tokens_by_document(run: RunFolder, start: Start) -> None:
    reported: dict[int, Logprobs] = {}
    async with serving(run, index=2) as server:
        server.on_logprobs = lambda message: reported.update({message.rank: message})
        trainer = start(Progress(2, 0, "warmup"))
        await server.hello(LIMIT)
        await take(server, 2, report=True)
        await take(server, 3)
        await server.end("finished", LIMIT)
        await trainer.reasons()
    assert sorted(reported) == [0, 1]
    for batch in batches(2):
        message = reported[batch.rank]
        counts = [
            int(document.sum())
            for micro in batch.micro_batches
            for document in np.split(micro.loss_mask, np.cumsum(micro.lengths)[:-1])
        ]
        assert message.index == 2 and message.lengths.tolist() == counts and min(counts) > 0
        assert message.documents == [name for micro in batch.micro_batches for name in micro.documents]
        assert message.logprobs.tolist() == list(range(sum(counts)))


async def test_a_report_that_is_lost_ends_nothing(
    run: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TransportError("no room")

    monkeypatch.setattr(BatchClient, "logprobs", refuse)
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        with caplog.at_level(logging.WARNING):
            await take(server, 0, report=True)
            await take(server, 1)
        await server.end("finished", LIMIT)
        await trainer.reasons()
    assert "the report lacks the trainer's logprobs of step 0: no room" in caplog.text


async def test_a_restarted_orchestrator_hears_of_a_rank_that_waits_for_another(
    run: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has batch 1 and waits in the step; rank 1 has not got it when the orchestrator dies."""
    held, fetch = threading.Event(), BatchClient.fetch

    def late(self: BatchClient, index: int, *rest: float):
        if index == 1 and self._greeting().rank == 1:
            assert held.wait(LIMIT)
        return fetch(self, index, *rest)

    monkeypatch.setattr(BatchClient, "fetch", late)
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        await take(server, 0)
        await server.offer(batches(1))
        async with asyncio.timeout(LIMIT):
            while not trainer.learners[0].meeting.n_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    async with serving(run, index=1, resumed=True, sealed=True) as server:
        held.set()
        hello = await server.hello(LIMIT)
        assert (hello.index, hello.taken) == (1, True)
        await take(server, 1)
        await take(server, 2)
        await server.end("finished", LIMIT)
        assert await trainer.reasons() == ["finished"] * RANKS


async def test_what_a_rank_says_of_itself_is_published_already(run: RunFolder, start: Start) -> None:
    """While weights are published the rank is still at the batch before."""
    seen = []
    async with serving(run, index=2) as server:
        trainer = start(Progress(2, 0, "warmup"))
        loop, learner = trainer.loops[0], trainer.learners[0]
        learner.publish = lambda version: seen.append((str(version), loop._greeting(), loop.doing)) or {}
        await server.hello(LIMIT)
        await take(server, 2)
        await server.end("finished", LIMIT)
        await trainer.reasons()
        ended = loop._greeting()
    version, hello, doing = seen[-1]
    assert (version, hello.index, hello.version) == ("1.1", 2, Version(1, 0))
    assert doing == "publishing weights 1.1"
    assert (ended.index, ended.version, ended.saved) == (3, Version(1, 1), -1)


async def test_a_heartbeat_says_what_the_rank_does(
    run: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = []
    monkeypatch.setattr(loop_module.heartbeat, "note", lambda doing, **more: notes.append((doing, more)))
    async with serving(run) as server:
        trainer = start()
        await server.hello(LIMIT)
        await take(server, 0, checkpoint=True)
        await server.durable(0, LIMIT)
        await server.end("finished", LIMIT)
        await trainer.reasons()
    said = [doing for doing, _ in notes]
    saving = f"saving {part(run, 1)}"
    for doing in ("waiting for batch 0", "step 0", saving, "waiting for batch 1"):
        assert said.count(doing) == RANKS
    assert json.dumps(notes) and {more["index"] for _, more in notes} == {0, 1}
