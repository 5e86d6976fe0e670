"""The trainer's loop: take a batch, step, publish the weights, say so, save, until there are no more.

It imports no torch: what is trained is behind the Learner protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from stackrl.runtime import checkpoints, heartbeat
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.ledger import Ledger
from stackrl.runtime.trainer.protocol import Learner
from stackrl.runtime.transport.batch_client import BatchClient
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import Batch, End, Hello, Logprobs, MicroBatch, Version
from stackrl.schemas.split import has_engines
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import RlStage, SupervisedStage

MEETING = 600.0
"""Seconds in which the orchestrator must answer the first greeting."""
GREETING_EVERY = 5.0
"""Seconds between further ones: a restarted orchestrator must hear of a rank that is busy with a batch."""
REPORT_LIMIT = 10.0
"""Seconds that sending logprobs for the report may take; training waits for it."""

log = logging.getLogger(__name__)


class Loop:
    """One rank's conversation with the orchestrator."""

    def __init__(
        self,
        run: RunFolder,
        stack: Stack,
        learner: Learner,
        ledger: Ledger,
        *,
        rank: int,
        ranks: int,
        context: int = 1,
        token: str,
    ) -> None:
        """``context``: how many neighbouring ranks share each batch; the first of them speaks for all."""
        self.doing = "starting"
        """In words, for an error that comes meanwhile."""
        self._learner, self._ledger, self._rank, self._ranks = learner, ledger, rank, ranks
        self._speaks = rank % context == 0
        self._incarnation = run.state().incarnation
        self._checkpoints = run.checkpoints(stack)
        self._rl = {stage.name for stage in stack.stages if isinstance(stage, RlStage)}
        self._supervised_steps = sum(s.steps for s in stack.stages if isinstance(s, SupervisedStage))
        self._publishes = has_engines(stack)
        self._position = (learner.progress.index, self._version())
        """What this rank says of itself: its next optimizer step and what it has published, as one."""
        self._begun = learner.progress.index
        """Of the checkpoint that was written last, or restored; it may still be on its way to the disk."""
        self._saved = -1
        self._held_up = 0.0
        """Seconds for which the last checkpoint kept training from going on."""
        self._ended = threading.Event()
        self._client = BatchClient(run.endpoints().orchestrator, token, self._greeting)

    def until_end(self) -> str:
        """Work until there are no more batches; why there are none.

        Raises TransportError where the orchestrator refuses or is silent, and what the learner raises.
        """
        self._publish()
        with self._client, self._staying_known():
            self._note("greeting the orchestrator")
            self._client.hello(timeout=MEETING)
            while True:
                began = time.monotonic()
                self._note(f"waiting for batch {self._index}")
                batch = self._client.fetch(self._index)
                if isinstance(batch, End):
                    self._leave(batch)
                    return batch.reason
                self._work(batch, waited=time.monotonic() - began)

    @property
    def _index(self) -> int:
        return self._position[0]

    def _version(self) -> Version:
        return Version(self._incarnation, self._learner.progress.step)

    def _work(self, batch: Batch, waited: float) -> None:
        began = time.monotonic()
        self._note(f"step {batch.index}")
        step = self._learner.apply(batch)
        self._ledger.add(batch, rl=self._speaks and batch.stage in self._rl)
        stepped = time.monotonic()
        published = self._publish()
        self._position = (self._learner.progress.index, self._version())
        if self._rank == 0:
            seconds = {
                "seconds_wait": waited,
                "seconds_step": stepped - began,
                "seconds_publish": time.monotonic() - stepped,
                "seconds_save": self._held_up,
            }
            self._note(f"acknowledging batch {batch.index}")
            self._client.ack(
                index=batch.index,
                step=batch.step,
                state="applied",
                version=self._position[1],
                metrics=step.metrics | seconds | published,
            )
        self._held_up = 0.0
        if step.logprobs is not None and self._speaks:
            self._report(batch, step.logprobs)
        if batch.checkpoint:
            self._save(batch.step)

    def _publish(self) -> dict[str, float]:
        """Give the engines, where there are any, the current weights; they sample nothing before supervised
        stages are over. Returns metrics of it."""
        if not self._publishes or self._learner.progress.index < self._supervised_steps:
            return {}
        self._note(f"publishing weights {self._version()}")
        return self._learner.publish(self._version())

    def _save(self, step: int) -> None:
        """Begin the checkpoint that resumes here; its last batch had RL step ``step``."""
        began, index = time.monotonic(), self._index

        def done() -> None:
            self._saved = index
            self._durable(index, step)

        folder = checkpoints.folder(self._checkpoints, index)
        self._note(f"saving {folder}")
        self._learner.save(folder, {self._ledger.name: self._ledger.content()}, done)
        self._begun = index
        self._held_up = time.monotonic() - began

    def _durable(self, index: int, step: int) -> None:
        """Say that the trainer's part of the checkpoint which resumes at ``index`` is on disk."""
        if self._rank:
            return
        try:
            self._client.ack(index=index - 1, step=step, state="durable", version=self._position[1])
        except TransportError as error:
            if not self._ended.is_set():
                raise
            log.warning("nobody was told that the checkpoint of step %d is on disk: %s", index, error)

    def _leave(self, end: End) -> None:
        """Bring what is being saved to disk; where the orchestrator asks for it, the present state too."""
        self._ended.set()
        step = self._learner.progress.step
        if end.save and self._begun != self._index:
            self._save(step)
        self._note("waiting until the checkpoint is on disk")
        self._learner.settle()
        if end.save and self._index and self._saved != self._index:
            self._durable(self._index, step)  # it is what this life was restored from

    def _report(self, batch: Batch, logprobs: np.ndarray) -> None:
        """Send what the report shows of ``batch``. Losing it is no reason to stop."""
        micro_batches = batch.micro_batches
        message = Logprobs(
            incarnation=self._incarnation,
            index=batch.index,
            rank=self._rank,
            documents=[name for micro in micro_batches for name in micro.documents],
            lengths=np.concatenate([np.empty(0, "<i4"), *(_trained(micro) for micro in micro_batches)]),
            logprobs=logprobs,
        )
        self._note(f"sending the logprobs of batch {batch.index}")
        try:
            self._client.logprobs(message, timeout=REPORT_LIMIT)
        except TransportError as error:
            log.warning("the report lacks the trainer's logprobs of step %d: %s", batch.index, error)

    def _greeting(self) -> Hello:
        index, version = self._position
        return Hello(
            incarnation=self._incarnation,
            rank=self._rank,
            ranks=self._ranks,
            index=index,
            version=version,
            weights=self._learner.source,
            saved=self._saved,
        )

    @contextmanager
    def _staying_known(self) -> Iterator[None]:
        """Greet again and again, whatever this rank is busy with.

        It may sit in a collective with a batch in hand, waiting for a rank that has none yet; a restarted
        orchestrator then has to learn from it which batch that is.
        """
        over = threading.Event()

        def greet() -> None:
            while not over.wait(GREETING_EVERY):
                try:
                    self._client.keep_known(timeout=GREETING_EVERY)
                except TransportError as error:
                    log.debug("%s", error)  # who needs an answer asks for it and meets the same
                except Exception:
                    if not over.is_set():  # else the client was closed meanwhile
                        raise

        threading.Thread(target=greet, name="greeting", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _note(self, doing: str) -> None:
        self.doing = doing
        heartbeat.note(doing, index=self._index)


def _trained(micro: MicroBatch) -> np.ndarray:
    """int32 [D]: how many tokens of each document are trained."""
    before = np.concatenate([[0], np.cumsum(micro.loss_mask != 0, dtype="<i4")])
    ends = np.cumsum(micro.lengths)
    return (before[ends] - before[ends - micro.lengths]).astype("<i4")
