"""The trainer's loop: take a batch, step, publish the weights, say so, save, until there are no more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing

from torch.distributed.device_mesh import DeviceMesh

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.parallelize import DTYPES, build, gathered
from stackrl.runtime.trainer.ranks import Rank
from stackrl.runtime.transport.batches import BatchClient
from stackrl.runtime.transport.messages import Batch, End, Version
from stackrl.runtime.transport.weights import Publisher, make_publisher
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import SupervisedStage

MEETING = 600.0
"""Seconds in which the orchestrator must answer the first greeting."""

log = logging.getLogger(__name__)


def run_trainer(run: RunFolder, me: Rank, mesh: DeviceMesh, token: str) -> None:
    """Train until the orchestrator ends the run; rank 0 then leaves the final model in the run's folder."""
    stack = run.stack()
    model = build(run.model, stack.trainer, stack.trainer.compute_dtype or stack.model.dtype, mesh)
    learner = Learner(stack, model)
    found = checkpoints.newest(run.checkpoints(stack))
    if found:
        learner.restore(found)
        log.info("resumed from %s", found)
    with ExitStack() as resources:
        publisher = None
        if me.rank == 0:
            publisher = resources.enter_context(closing(make_publisher(run, stack, token)))
        client = resources.enter_context(BatchClient(run.endpoints().orchestrator, token, me.rank, me.ranks))
        reason = _Loop(run, stack, learner, client, publisher).until_end()
    log.info("the run is over after %d optimizer steps: %s", learner.progress.index, reason)
    if reason == "finished":
        tensors = gathered(model, DTYPES[stack.model.dtype])
        if me.rank == 0:
            folder.export(tensors, run.model, run.final, stack.model.dtype)
        else:
            _join_in(tensors)


class _Loop:
    """One rank's conversation with the orchestrator. Without a ``publisher`` it is not rank 0."""

    def __init__(
        self, run: RunFolder, stack: Stack, learner: Learner, client: BatchClient, publisher: Publisher | None
    ) -> None:
        self._stack, self._learner, self._client, self._publisher = stack, learner, client, publisher
        self._incarnation = run.state().incarnation
        self._checkpoints = run.checkpoints(stack)
        self._supervised_steps = sum(s.steps for s in stack.stages if isinstance(s, SupervisedStage))

    @property
    def _version(self) -> Version:
        return Version(self._incarnation, self._learner.progress.step)

    def until_end(self) -> str:
        """Work until there are no more batches; why there are none."""
        if self._learner.progress.index >= self._supervised_steps:
            self._publish()
        self._client.hello(
            incarnation=self._incarnation,
            index=self._learner.progress.index,
            version=self._version,
            weights=self._publisher.source if self._publisher else "",
            timeout=MEETING,
        )
        while True:
            began = time.monotonic()
            batch = self._client.fetch(self._learner.progress.index)
            if isinstance(batch, End):
                return batch.reason
            self._work(batch, waited=time.monotonic() - began)

    def _work(self, batch: Batch, waited: float) -> None:
        began = time.monotonic()
        metrics = self._learner.apply(batch)
        stepped = time.monotonic()
        if self._learner.progress.index >= self._supervised_steps:
            self._publish()
        metrics["seconds_wait"] = waited
        metrics["seconds_step"] = stepped - began
        metrics["seconds_publish"] = time.monotonic() - stepped
        if self._publisher:
            self._client.ack(
                index=batch.index, step=batch.step, state="applied", version=self._version, metrics=metrics
            )
        if batch.checkpoint:
            self._learner.save(checkpoints.folder(self._checkpoints, self._learner.progress.index))
            if self._publisher:
                self._client.ack(index=batch.index, step=batch.step, state="durable", version=self._version)

    def _publish(self) -> None:
        """Give the engines the current weights, in the type that they compute in."""
        tensors = gathered(self._learner.model, DTYPES[self._stack.model.dtype])
        if self._publisher:
            self._publisher.publish(self._version, tensors)
        else:
            _join_in(tensors)


def _join_in(tensors: Iterable[object]) -> None:
    """Take part in gathering what rank 0 keeps."""
    for _ in tensors:
        pass
