"""A trainer without a model: it takes batches over the real transport and acknowledges them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.ledger import Ledger
from stackrl.runtime.transport.batch_client import BatchClient
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import Batch, End, Hello, Logprobs, Version

SOURCE = "http://weights.invalid"
GREETING_EVERY = 0.5
"""Seconds between greetings of a rank, whatever it is busy with."""


class FakeTrainer:
    """All ranks, each in a thread. Use as a context; leaving it ends them.

    It stays what it is when the orchestrator dies, and says hello to the next one. Its checkpoints hold the
    documents that it has trained on, so that those of a lineage can be told.
    """

    def __init__(
        self,
        run: RunFolder,
        token: str,
        *,
        ranks: int = 1,
        stop_at: int | None = None,
        step_delay: float = 0.0,
        save_delay: float = 0.0,
    ) -> None:
        """``stop_at``: the optimizer step before which it goes away without a word."""
        self._run, self._token, self._ranks = run, token, ranks
        self._stop_at, self._step_delay, self._save_delay = stop_at, step_delay, save_delay
        self._stack = run.stack()
        self._incarnation = run.state().incarnation
        self._supervised = sum(s.steps for s in self._stack.stages if s.type == "supervised")
        found = run.restore()
        self.start = checkpoints.index_of(found) if found else 0
        self.batches: dict[int, dict[int, Batch]] = defaultdict(dict)
        """Batches by optimizer step and rank."""
        self.trained: dict[str, list[list[str]]] = _trained_by(found)
        """Optimizer step → the documents of each time that it was taken, in the lineage of this trainer."""
        self.ledger = Ledger.restored(0, found)
        """That of all ranks."""
        self.ended: list[End] = []
        self.errors: list[Exception] = []
        self.metrics = {"loss": 0.5, "gradient_norm": 1.0, "weights_finite": 1.0, "tokens_packed": 10.0}
        self._saved = -1
        self._leave = threading.Event()
        self._meeting = threading.Barrier(ranks)
        self._threads = [threading.Thread(target=self._guard, args=(rank,)) for rank in range(ranks)]

    def __enter__(self) -> FakeTrainer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        self._meeting.abort()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a rank of the fake trainer hangs"

    def steps(self) -> list[Batch]:
        """Rank 0's batches in order."""
        return [self.batches[index][0] for index in sorted(self.batches)]

    def _guard(self, rank: int) -> None:
        try:
            _Rank(self, rank).work()
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            self.errors.append(error)


class _Rank:
    def __init__(self, trainer: FakeTrainer, rank: int) -> None:
        self._trainer, self._rank = trainer, rank
        index = trainer.start
        self._position = (index, self._version(index))

    def work(self) -> None:
        trainer = self._trainer
        url = trainer._run.endpoints().orchestrator
        with BatchClient(url, trainer._token, self._greeting) as client, self._staying_known(client):
            self._until_answered(lambda: client.hello(timeout=2))
            while trainer._stop_at is None or self._position[0] < trainer._stop_at:
                message = self._fetch(client)
                if isinstance(message, End):
                    self._end(client, message)
                if not isinstance(message, Batch):
                    return
                self._step(client, message)

    @contextlib.contextmanager
    def _staying_known(self, client: BatchClient) -> Iterator[None]:
        """As the real loop does: this rank may wait for another one, which a restarted orchestrator lets wait
        until it has heard of this rank too."""
        over = threading.Event()

        def greet() -> None:
            while not over.wait(GREETING_EVERY):
                with contextlib.suppress(TransportError, RuntimeError):  # the client may be closed meanwhile
                    client.keep_known(timeout=GREETING_EVERY)

        threading.Thread(target=greet, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _step(self, client: BatchClient, batch: Batch) -> None:
        trainer = self._trainer
        trainer.batches[batch.index][self._rank] = batch
        time.sleep(trainer._step_delay)
        trainer._meeting.wait(timeout=60)
        index = batch.index + 1
        if self._rank == 0:
            ranks = list(trainer.batches[batch.index].values())
            documents = [name for b in ranks for micro in b.micro_batches for name in micro.documents]
            for taken in ranks:
                trainer.ledger.add(taken, rl=taken.index >= trainer._supervised)
            trainer.trained.setdefault(str(batch.index), []).append(sorted(documents))
        self._position = (index, self._version(index))
        if self._rank == 0:
            self._say(client, batch, "applied", metrics=trainer.metrics)
        if batch.report:
            self._until_answered(lambda: client.logprobs(_logprobs(batch), timeout=2))
        if batch.checkpoint and self._rank == 0:
            self._save(client, batch.step)

    def _end(self, client: BatchClient, end: End) -> None:
        if end.save and self._rank == 0 and self._trainer._saved != self._position[0]:
            self._save(client, self._position[1].step)
        self._trainer.ended.append(end)

    def _save(self, client: BatchClient, step: int) -> None:
        trainer, index = self._trainer, self._position[0]
        time.sleep(trainer._save_delay)
        part = checkpoints.folder(trainer._run.checkpoints(trainer._stack), index) / "trainer"
        part.mkdir(parents=True, exist_ok=True)
        (part / "trained.json").write_text(json.dumps(trainer.trained))
        (part / trainer.ledger.name).write_bytes(trainer.ledger.content())
        (part / "progress.json").write_text(f'{{"index": {index}}}')
        trainer._saved = index
        said = {"index": index - 1, "step": step, "version": self._position[1]}
        self._until_answered(lambda: client.ack(**said, state="durable", timeout=2))

    def _say(self, client: BatchClient, batch: Batch, state: str, **more: object) -> None:
        said = {"index": batch.index, "step": batch.step, "version": self._position[1], "state": state}
        self._until_answered(lambda: client.ack(**said, **more, timeout=2))

    def _fetch(self, client: BatchClient) -> Batch | End | None:
        """None when told to go away."""
        return self._until_answered(lambda: client.fetch(self._position[0], silence=0.5))

    def _until_answered(self, ask):
        """Ask until there is an answer; None when told to go away meanwhile."""
        while not self._trainer._leave.is_set():
            try:
                return ask()
            except TransportError as error:
                if "the orchestrator refused" in str(error):
                    raise
        return None

    def _version(self, index: int) -> Version:
        return Version(self._trainer._incarnation, max(0, index - self._trainer._supervised))

    def _greeting(self) -> Hello:
        index, version = self._position
        return Hello(
            incarnation=version.incarnation,
            rank=self._rank,
            ranks=self._trainer._ranks,
            index=index,
            version=version,
            weights="" if self._rank else SOURCE,
            saved=self._trainer._saved,
        )


def _trained_by(checkpoint: Path | None) -> dict[str, list[list[str]]]:
    file = checkpoint / "trainer" / "trained.json" if checkpoint else None
    return json.loads(file.read_bytes()) if file and file.exists() else {}


def _logprobs(batch: Batch) -> Logprobs:
    """Zero for each trained token."""
    lengths = [
        int(np.count_nonzero(micro.loss_mask[end - length : end]))
        for micro in batch.micro_batches
        for end, length in zip(np.cumsum(micro.lengths), micro.lengths, strict=True)
    ]
    return Logprobs(
        incarnation=batch.incarnation,
        index=batch.index,
        rank=batch.rank,
        documents=[name for micro in batch.micro_batches for name in micro.documents],
        lengths=np.array(lengths, dtype="<i4"),
        logprobs=np.zeros(sum(lengths), dtype="<f4"),
    )
