"""A trainer without a model: it takes batches over the real transport and acknowledges them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchClient, TransportError
from stackrl.runtime.transport.messages import Batch, End, Version

SOURCE = "http://weights.invalid"


class FakeTrainer:
    """All ranks, each in a thread. Use as a context; leaving it ends them."""

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
        self._supervised = sum(s.steps for s in self._stack.stages if s.type == "supervised")
        found = checkpoints.newest(run.checkpoints(self._stack))
        self.start = checkpoints.index_of(found) if found else 0
        self.batches: dict[int, dict[int, Batch]] = defaultdict(dict)
        """Batches by optimizer step and rank."""
        self.ended: list[str] = []
        self.errors: list[Exception] = []
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
            self._work(rank)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            self.errors.append(error)

    def _work(self, rank: int) -> None:
        incarnation = self._run.state().incarnation
        index, step = self.start, max(0, self.start - self._supervised)
        with BatchClient(self._run.endpoints().orchestrator, self._token, rank, self._ranks) as client:
            version = Version(incarnation, step)
            weights = SOURCE if rank == 0 else ""
            client.hello(incarnation=incarnation, index=index, version=version, weights=weights, timeout=20)
            while True:
                if self._stop_at is not None and index >= self._stop_at:
                    return
                batch = self._fetch(client, index)
                if batch is None:
                    return
                if isinstance(batch, End):
                    self.ended.append(batch.reason)
                    return
                self.batches[index][rank] = batch
                index += 1
                step += index > self._supervised
                time.sleep(self._step_delay)
                self._meeting.wait(timeout=60)
                if rank == 0:
                    self._acknowledge(client, batch, index, Version(incarnation, step))

    def _fetch(self, client: BatchClient, index: int) -> Batch | End | None:
        """None when told to go away."""
        while not self._leave.is_set():
            try:
                return client.fetch(index, silence=0.5)
            except TransportError as error:
                if "the orchestrator refused" in str(error):
                    raise
        return None

    def _acknowledge(self, client: BatchClient, batch: Batch, index: int, version: Version) -> None:
        said = {"index": batch.index, "step": batch.step, "version": version, "timeout": 2}
        client.ack(**said, state="applied", metrics={"loss": 0.5, "tokens_packed": 10.0})
        if batch.checkpoint:
            time.sleep(self._save_delay)
            folder = checkpoints.folder(self._run.checkpoints(self._stack), index) / "trainer"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "progress.json").write_text(f'{{"index": {index}}}')
            client.ack(**said, state="durable")
