"""`stages:` what happens one after the other, and what a stage changes for itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, create_model

from stackrl.schemas.algorithm import Algorithm
from stackrl.schemas.base import Model, Name, variant
from stackrl.schemas.environments import Environment
from stackrl.schemas.inference import Sampling
from stackrl.schemas.optimizers import AdamW


def _partial(model: type[Model]) -> type[Model]:
    """`model` with every key optional: a stage says only what it changes."""
    fields: dict[str, Any] = {
        name: (field.annotation | None, Field(default=None, description=field.description))
        if not field.metadata
        else (
            Annotated[field.annotation, *field.metadata] | None,
            Field(default=None, description=field.description),
        )
        for name, field in model.model_fields.items()
    }
    return create_model(
        f"{model.__name__}Change", __base__=Model, __doc__=f"Changes to {model.__name__}.", **fields
    )


AlgorithmChange = _partial(Algorithm)
SamplingChange = _partial(Sampling)
OptimizerChange = _partial(AdamW)


class SupervisedStage(Model):
    """Learn from the environments' demonstrations. Supervised stages come before all others."""

    name: Name
    """Unique; metrics carry it."""
    type: Literal["supervised"]
    """What is learnt from."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations in one step."""
    noise: float = Field(default=0.0, ge=0, le=1)
    """Probability that a symbol of a demonstration is replaced by a random one."""
    clean_steps: int = Field(default=0, ge=0)
    """Steps at the start of the stage whose demonstrations stay clean."""
    environments: list[Environment] | None = Field(default=None, min_length=1)
    """Instead of the stack's environments, in this stage."""
    optimizer: OptimizerChange | None = None
    """Changes to `trainer.optimizer` in this stage. Every stage starts a fresh optimizer and schedule."""


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
    """Changes to `trainer.optimizer` in this stage. Every stage starts a fresh optimizer and schedule."""


Stage = Annotated[
    Annotated[SupervisedStage, Tag("supervised")] | Annotated[RlStage, Tag("rl")],
    variant("type"),
]
