"""Rules over losses. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.losses import Correction, DecoupledPpoLoss, Loss, ReinforceLoss
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage

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


def _correction(loss: Loss) -> Correction | None:
    return loss.correction if isinstance(loss, ReinforceLoss | DecoupledPpoLoss) else None


def _losses(stack: Stack) -> Iterator[tuple[Path, Loss]]:
    """Each loss that an rl stage uses, where it is written."""
    told: set[Path] = set()
    for index, stage in enumerate(stack.stages):
        if not isinstance(stage, RlStage):
            continue
        here = stage.algorithm is not None and stage.algorithm.loss is not None
        path = at("stages", index, "algorithm", "loss") if here else at("algorithm", "loss")
        if path not in told:
            told.add(path)
            yield path, settings_of(stack, stage).algorithm.loss
