"""The model and its optimizer on their way through the stages of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from stackrl.runtime.trainer import checkpoint, lora, losses
from stackrl.runtime.trainer.checkpoint import Saver
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import DTYPES, gathered
from stackrl.runtime.trainer.protocol import Progress, Step
from stackrl.runtime.trainer.reference import Reference
from stackrl.runtime.trainer.schedule import rate
from stackrl.runtime.trainer.step import AGAINST_ENGINE, Objective, train_step
from stackrl.runtime.trainer.validation import validate
from stackrl.runtime.transport.messages import Batch, Version
from stackrl.runtime.transport.weights import Publisher
from stackrl.schemas.comparison import compares_with_reference
from stackrl.schemas.stack import Stack, StageSettings, settings_of
from stackrl.schemas.stages import RlStage, Stage


class Learner:
    """What one trainer rank trains, as the Learner of protocol.py: a sharded model."""

    def __init__(
        self,
        stack: Stack,
        model: Decoder,
        publisher: Publisher | None = None,
        reference: Reference | None = None,
    ) -> None:
        """``publisher``: where rank 0 leaves weights for the engines; the other ranks have none.
        ``reference``: tells what losses compare with, where the orchestrator does not.

        Raises OwnCodeError where a loss of the user's own is not there, or fails.
        """
        self.model = model
        self.progress = Progress()
        self.source = publisher.source if publisher else ""
        self._publisher = publisher
        self._dtype = stack.model.dtype
        self._lora = stack.trainer.lora
        self._balance_rate = stack.trainer.mixture.balance_rate
        self._stages = {stage.name: stage for stage in stack.stages}
        self._settings = {stage.name: settings_of(stack, stage) for stage in stack.stages}
        self._objectives = {
            stage.name: _objective(stage, self._settings[stage.name]) for stage in stack.stages
        }
        self._reference = reference
        self._optimizer: torch.optim.Optimizer | None = None
        self._saver = Saver(next(model.parameters()).device.type)

    def apply(self, batch: Batch) -> Step:
        stage, settings = self._stages[batch.stage], self._settings[batch.stage]
        if batch.stage != self.progress.stage:
            self._optimizer = make_optimizer(self.model, settings.optimizer)
        step = train_step(
            self.model,
            self._optimizer,
            batch,
            self._objectives[stage.name],
            rate=rate(batch.stage_step, settings.optimizer, stage.steps),
            limit=settings.optimizer.max_gradient_norm,
            balance_rate=self._balance_rate,
            reference=self._reference if self._objectives[stage.name].refers else None,
        )
        if batch.held_out:
            step = replace(step, metrics=step.metrics | validate(self.model, batch.held_out))
        rl = isinstance(stage, RlStage)
        self.progress = Progress(index=batch.index + 1, step=batch.step + rl, stage=batch.stage)
        if rl:
            return step
        return replace(step, metrics={n: step.metrics[n] for n in step.metrics.keys() - AGAINST_ENGINE})

    def publish(self, version: Version) -> dict[str, float]:
        """Give the engines the current weights, in the type that they compute in."""
        tensors = gathered(self.model, DTYPES[self._dtype])
        if not self._publisher:
            _join_in(tensors)
            return {}
        published = self._publisher.publish(version, tensors)
        return {"weight_bytes": published.whole, "weight_bytes_sent": published.sent}

    def save(self, target: Path, files: Mapping[str, bytes], done: Callable[[], None]) -> None:
        state = checkpoint.state_of(self.model, self._optimizer)
        self._saver.begin(target, state, self.progress, files, done)

    def settle(self) -> None:
        self._saver.settle()

    def restore(self, source: Path) -> None:
        """Go on from the checkpoint at ``source``, with the optimizer's settings of this stack."""
        self.progress = checkpoint.stored_progress(source)
        self._optimizer = make_optimizer(self.model, self._settings[self.progress.stage].optimizer)
        checkpoint.load(source, self.model, self._optimizer)

    def export(self, source: Path, target: Path, *, write: bool) -> None:
        """Leave the model at ``target`` as a Hugging Face folder with what else is in ``source``, and its
        adapters, where it has any, beside it.

        One rank has to ``write`` it, the others help.
        """
        tensors = gathered(self.model, DTYPES[self._dtype])
        if write:
            folder.export(tensors, source, target, self._dtype)
        else:
            _join_in(tensors)
        if self._lora:
            adapters = lora.adapters(self.model)
            if write:
                lora.save(adapters, self._lora, source, target.with_name(lora.FOLDER))
            else:
                _join_in(adapters)


def _join_in(tensors: Iterable[object]) -> None:
    """Take part in gathering what rank 0 keeps."""
    for _ in tensors:
        pass


def _objective(stage: Stage, settings: StageSettings) -> Objective:
    if isinstance(stage, RlStage):
        algorithm = settings.algorithm
        return Objective(
            losses.make(algorithm.loss, refers=algorithm.reference is not None),
            algorithm.loss.normalize,
            settings.sampling.max_tokens,
            refers=compares_with_reference(settings),
            distillation=partial(losses.distillation, algorithm.distillation),
        )
    return Objective(losses.supervised, "token", settings.sampling.max_tokens)
