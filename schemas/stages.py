"""`stages:` what happens one after the other, and what a stage changes for itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from stackrl.schemas.algorithm import Algorithm
from stackrl.schemas.base import Model, Name, variant
from stackrl.schemas.changes import Change, partial
from stackrl.schemas.data import Data, Validation
from stackrl.schemas.environments import Environment
from stackrl.schemas.inference import Sampling, SamplingChange
from stackrl.schemas.optimizers import OPTIMIZERS
from stackrl.schemas.schedules import SCHEDULES

AlgorithmChange = partial("AlgorithmChange", Algorithm)
ScheduleChange = partial("ScheduleChange", *SCHEDULES)
OptimizerChange = partial("OptimizerChange", *OPTIMIZERS, schedule=ScheduleChange)
CHANGED: dict[type[Change], tuple[type[Model], ...]] = {
    AlgorithmChange: (Algorithm,),
    SamplingChange: (Sampling,),
    ScheduleChange: SCHEDULES,
    OptimizerChange: OPTIMIZERS,
}
"""What each can be a change of."""


class SupervisedStage(Model):
    """Learn from examples: the rows of `data`, or the environments' demonstrations. Supervised stages come
    before all others."""

    name: Name
    """Unique; metrics carry it."""
    type: Literal["supervised"]
    """What is learnt from."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. With `data` it may be left out: `epochs` counts then."""
    epochs: float | None = Field(default=None, gt=0)
    """Times that each row of `data` is learnt, instead of `steps`; where neither is given, once."""
    batch_size: int = Field(default=64, ge=1)
    """Rows, or demonstrations, in one step. With `epochs` rows are dealt evenly: a step may have fewer."""
    data: Data | None = None
    """Files to learn from, instead of environments."""
    validation: Validation | None = None
    """Rows beside `data` whose loss is measured and not learnt."""
    noise: float = Field(default=0.0, ge=0, le=1)
    """Probability that a symbol of a demonstration is replaced by a random one."""
    clean_steps: int = Field(default=0, ge=0)
    """Steps at the start of the stage whose demonstrations stay clean."""
    environments: list[Environment] | None = Field(default=None, min_length=1)
    """Instead of the stack's environments, in this stage."""
    optimizer: OptimizerChange | None = None
    """Changes to `trainer.optimizer` in this stage; another `type` begins with that type's defaults.
    Every stage starts a fresh optimizer and schedule."""


class RlStage(Model):
    """Learn from rewards."""

    name: Name
    """Unique; metrics carry it."""
    type: Literal["rl"]
    """What is learnt from."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    environments: list[Environment] | None = Field(default=None, min_length=1)
    """Instead of the stack's environments, in this stage."""
    sampling: SamplingChange | None = None
    """Changes to `sampling` in this stage."""
    algorithm: AlgorithmChange | None = None
    """Changes to `algorithm` in this stage."""
    optimizer: OptimizerChange | None = None
    """Changes to `trainer.optimizer` in this stage; another `type` begins with that type's defaults.
    Every stage starts a fresh optimizer and schedule."""


Stage = Annotated[
    Annotated[SupervisedStage, Tag("supervised")] | Annotated[RlStage, Tag("rl")],
    variant("type"),
]
