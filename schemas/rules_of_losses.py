"""Rules over losses. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.algorithm import Algorithm
from stackrl.schemas.losses import Correction, DecoupledPpoLoss, Loss, ReinforceLoss
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage, SupervisedStage

Problems = Iterator[Problem]


def corrections_have_room(stack: Stack) -> Problems:
    """Some weight is within the bounds, and that of agreement is."""
    for path, loss in _losses(stack):
        correction = _correction(loss)
        if correction is None:
            continue
        for key, fits, mend in (
            ("low", correction.low <= 1, "make it 1 or less"),
            ("high", correction.high >= 1, "make it 1 or more"),
        ):
            if not fits:
                what = f"{getattr(correction, key):g} cuts off 1, the weight where trainer and engine agree"
                yield Problem((*path, "correction", key), what, mend)


def own_losses_are_named(stack: Stack) -> Problems:
    """A path with a folder, and no function in it, would be looked for as an entry point."""
    for path, loss in _losses(stack):
        if loss.type == "python" and ":" not in loss.path and ("/" in loss.path or loss.path.endswith(".py")):
            what = f"{loss.path} names a file and no function"
            yield Problem((*path, "path"), what, f"say {loss.path}:function")


def references_are_meant(stack: Stack) -> Problems:
    """The reference that the trainer keeps is what the run began with, before any supervised stage."""
    mend = "give algorithm.reference: {endpoint: http://…, model: …}, or say kl: {reference: first_weights}"
    learnt = any(isinstance(stage, SupervisedStage) for stage in stack.stages)
    told: set[Path] = set()
    for stage, path, algorithm in _algorithms(stack):
        kl, other = algorithm.loss.kl, algorithm.reference is not None
        if kl is None or path in told:
            continue
        if learnt and not other and kl.reference is None:
            told.add(path)
            what = f"stage {stage} would be pulled back to the weights before the supervised stages"
            yield Problem((*path, "kl"), what, mend, at_key=True)
        if other and kl.reference is not None:
            told.add(path)
            what = f"in stage {stage} algorithm.reference is what the loss compares with"
            yield Problem((*path, "kl", "reference"), what, "remove one of the two", at_key=True)


def _correction(loss: Loss) -> Correction | None:
    return loss.correction if isinstance(loss, ReinforceLoss | DecoupledPpoLoss) else None


def _losses(stack: Stack) -> Iterator[tuple[Path, Loss]]:
    """Each loss that an rl stage uses, where it is written."""
    told: set[Path] = set()
    for _, path, algorithm in _algorithms(stack):
        if path not in told:
            told.add(path)
            yield path, algorithm.loss


def _algorithms(stack: Stack) -> Iterator[tuple[str, Path, Algorithm]]:
    """Each rl stage's name, where its loss is written, and its algorithm."""
    for index, stage in enumerate(stack.stages):
        if isinstance(stage, RlStage):
            here = stage.algorithm is not None and stage.algorithm.says("loss")
            path = at("stages", index, "algorithm", "loss") if here else at("algorithm", "loss")
            yield stage.name, path, settings_of(stack, stage).algorithm
