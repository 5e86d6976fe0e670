"""The model and its optimizer on their way through the stages of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from stackrl.runtime.trainer import checkpoint, losses
from stackrl.runtime.trainer.checkpoint import Progress
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.optimizer import make_optimizer, rate
from stackrl.runtime.trainer.step import AGAINST_ENGINE, Objective, train_step
from stackrl.runtime.transport.messages import Batch
from stackrl.schemas.stack import Stack, StageSettings, settings_of
from stackrl.schemas.stages import RlStage, Stage


class Learner:
    """What one trainer rank trains. All ranks call the same methods together."""

    def __init__(self, stack: Stack, model: Decoder) -> None:
        self.model = model
        self.progress = Progress()
        self._stages = {stage.name: stage for stage in stack.stages}
        self._settings = {stage.name: settings_of(stack, stage) for stage in stack.stages}
        self._optimizer: torch.optim.Optimizer | None = None

    def apply(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step; returns its metrics."""
        stage, settings = self._stages[batch.stage], self._settings[batch.stage]
        if batch.stage != self.progress.stage:
            self._optimizer = make_optimizer(self.model, settings.optimizer)
        metrics = train_step(
            self.model,
            self._optimizer,
            batch,
            _objective(stage, settings),
            rate=rate(batch.stage_step, settings.optimizer, stage.steps),
            limit=settings.optimizer.max_gradient_norm,
        )
        rl = isinstance(stage, RlStage)
        self.progress = Progress(index=batch.index + 1, step=batch.step + rl, stage=batch.stage)
        return metrics if rl else {name: metrics[name] for name in metrics.keys() - AGAINST_ENGINE}

    def save(self, folder: Path) -> None:
        """Write the trainer's part of the checkpoint at ``folder``."""
        checkpoint.save(folder, self.model, self._optimizer, self.progress)

    def restore(self, folder: Path) -> None:
        """Go on from the checkpoint at ``folder``."""
        self.progress = checkpoint.stored_progress(folder)
        self._optimizer = make_optimizer(self.model, self._settings[self.progress.stage].optimizer)
        checkpoint.load(folder, self.model, self._optimizer)


def _objective(stage: Stage, settings: StageSettings) -> Objective:
    if isinstance(stage, RlStage):
        loss = settings.algorithm.loss
        return Objective(losses.make(loss), loss.normalize, settings.sampling.max_tokens)
    return Objective(losses.supervised, "token", settings.sampling.max_tokens)
