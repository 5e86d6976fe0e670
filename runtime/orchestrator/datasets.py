"""The batches of a stage that learns from files, drawn from its stores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stackrl.runtime.data.files import DataError
from stackrl.runtime.data.order import Order, held_out, places_of
from stackrl.runtime.data.store import Store
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.training import Work
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.data import Data
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import SupervisedStage

LEARNT, HELD_OUT = "learnt", "held out"
"""What a stage's files are for."""


class Dataset:
    """The batches of a stage with data, each the same whenever it is drawn.

    Raises DataError where the rows do not suffice for the stage's steps.
    """

    def __init__(self, stage: SupervisedStage, stack: Stack, run: RunFolder) -> None:
        self._stage = stage
        seeds = Seeds(stack.seed).branch("supervised", stage.name)
        stores = {part: Store(store_folder(run, stack, stage, part, data)) for part, data in parts(stage)}
        self._store = stores[LEARNT]
        learnt, out = np.arange(len(self._store)), np.arange(0)
        self._held_out_store = stores.get(HELD_OUT, self._store)
        if HELD_OUT in stores:
            out = np.arange(len(stores[HELD_OUT]))
        elif stage.validation is not None:
            learnt, out = held_out(len(self._store), stage.validation.share, seeds)
            out = out[: stage.validation.limit]
            if not len(out):
                raise DataError(f"stage {stage.name} has one row: none can be held out for its validation")
        self._out = out
        self._order = Order(learnt, seeds, shuffle=stage.data.shuffle)
        self._places = None if stage.epochs is None else places_of(len(learnt), stage.epochs)
        if self._places is not None and self._places < stage.steps:
            raise DataError(
                f"stage {stage.name} has {stage.steps} steps, as many as all of its rows fill, but only "
                f"{self._places} are left to learn (the others are too long, or held out); say steps: "
                f"{self._places} instead of epochs"
            )

    def work(self, step: int) -> Work:
        """The batch of the stage's step ``step``; with the held-out rows where they are due after it."""
        start, end = self._place(step), self._place(step + 1)
        rows = self._order.between(start, end)
        return Work(
            self._stage,
            step,
            [sample for row in rows for sample in _samples(self._store, row)],
            record={"epoch": end / len(self._order), "rows": len(rows)},
            held_out=self._validation() if self._validates_after(step) else (),
        )

    def _place(self, step: int) -> int:
        """Rows behind the stage before its step ``step``."""
        if self._places is None:
            return step * self._stage.batch_size
        return step * self._places // self._stage.steps

    def _validates_after(self, step: int) -> bool:
        validation, done = self._stage.validation, step + 1
        return validation is not None and (done % validation.every == 0 or done == self._stage.steps)

    def _validation(self) -> list[Sample]:
        return [sample for row in self._out for sample in _samples(self._held_out_store, int(row))]


def parts(stage: SupervisedStage) -> Iterator[tuple[str, Data]]:
    """What is read for ``stage``: its rows, and held-out rows that have files of their own."""
    yield LEARNT, stage.data
    if stage.validation is not None and stage.validation.path is not None:
        files = {"path": stage.validation.path, "limit": stage.validation.limit}
        yield HELD_OUT, stage.data.model_copy(update=files)


def store_folder(run: RunFolder, stack: Stack, stage: SupervisedStage, part: str, data: Data) -> Path:
    """Where a store lies; another one wherever its tokens would be others."""
    digest = hashlib.sha256(json.dumps(data.model_dump(exclude={"shuffle"})).encode())
    digest.update(str(stack.trainer.sequence_length).encode())
    for file in sorted(run.model.glob("*token*")) + sorted(run.model.glob("chat_template*")):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return run.data / f"{stage.name}-{part.replace(' ', '-')}-{digest.hexdigest()[:12]}"


def _samples(store: Store, row: int) -> list[Sample]:
    return [
        Sample(
            rollout="demonstration",
            group=0,
            environment="",
            tokens=tokens,
            loss_mask=learnt,
            logprobs=np.zeros(len(tokens), dtype="<f4"),
        )
        for tokens, learnt in store.row(row)
    ]
