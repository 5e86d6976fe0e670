"""How many steps a stage with data has: counted in its files when a run is made, then kept with the run."""

from __future__ import annotations

from stackrl.schemas.data import Data, Validation
from stackrl.schemas.problems import Path, Problem, StackError, at
from stackrl.schemas.rules_of_optimizers import schedules_fit
from stackrl.schemas.stack import Stack
from stackrl.schemas.stages import Stage, SupervisedStage


def counted(stack: Stack) -> Stack:
    """``stack`` with the number of steps of every stage; the rows of those with data are counted.

    Raises StackError where files cannot be found or read, and where warmup or decay find no room.
    """
    problems: list[Problem] = []
    stages = [_with_steps(stage, index, problems) for index, stage in enumerate(stack.stages)]
    known = stack.model_copy(update={"stages": stages})
    if problems := problems or list(schedules_fit(known)):
        raise StackError(problems)
    return known


def as_asked(stack: Stack) -> Stack:
    """The inverse: without the steps that were counted."""
    stages = [
        stage.model_copy(update={"steps": None}) if getattr(stage, "epochs", None) is not None else stage
        for stage in stack.stages
    ]
    return stack.model_copy(update={"stages": stages})


def _with_steps(stage: Stage, index: int, problems: list[Problem]) -> Stage:
    if not isinstance(stage, SupervisedStage) or stage.data is None:
        return stage
    path, validation = at("stages", index), stage.validation
    rows = _count(stage.data, (*path, "data", "path"), problems)
    if validation is not None and validation.path is not None:
        _count(validation, (*path, "validation", "path"), problems)
    if stage.steps is not None or not rows:
        return stage
    from stackrl.runtime.data.order import held_out_count, steps_of

    if validation is not None and validation.share is not None:
        rows -= held_out_count(rows, validation.share)
    epochs = stage.epochs or 1.0
    return stage.model_copy(update={"epochs": epochs, "steps": steps_of(rows, epochs, stage.batch_size)})


def _count(source: Data | Validation, path: Path, problems: list[Problem]) -> int:
    """Rows of ``source``; what is wrong with its files, which are named at ``path``, goes to ``problems``."""
    from stackrl.runtime.data import files

    try:
        rows = files.count(files.find(source.path), source.limit)
    except files.DataError as error:
        problems.append(Problem(path, str(error)))
        return 0
    if not rows:
        problems.append(Problem(path, "the files hold no rows"))
    return rows
