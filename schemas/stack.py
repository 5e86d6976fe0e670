"""The stack: everything under `_metadata.stack` of a task file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stackrl.schemas.algorithm import Advantage, Algorithm
from stackrl.schemas.base import Model, untouched
from stackrl.schemas.changes import changed
from stackrl.schemas.environments import Component, Environment, Evaluate
from stackrl.schemas.guards import Guards
from stackrl.schemas.inference import Inference, PullWeights, Sampling, Weights
from stackrl.schemas.limits import Limits
from stackrl.schemas.model import ModelSource
from stackrl.schemas.optimizers import Optimizer
from stackrl.schemas.roles import Roles
from stackrl.schemas.stages import RlStage, Stage
from stackrl.schemas.trainer import Trainer


class Checkpoint(Model):
    """When the run is saved, so that it can be resumed."""

    path: str | None = None
    """Folder for checkpoints; by default one in the run's own folder, which is lost with its machine."""
    every: int = Field(default=50, ge=1)
    """Optimizer steps between checkpoints. The end of the run is always saved."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints at every so many optimizer steps stay for good besides; a multiple of `every`."""


class Wandb(Model):
    """Weights & Biases. Without a key (WANDB_API_KEY) the run is recorded offline in the run's folder."""

    project: str = Field(min_length=1)
    """The project that the run appears in."""
    entity: str | None = None
    """User or team; by default the key's own."""


class Rollouts(Model):
    """Which rollouts are kept for the report."""

    every: int = Field(default=1, ge=1)
    """Those of every so many RL steps."""
    keep: int = Field(default=10_000, ge=1)
    """Newest rollouts that stay."""


class Monitors(Model):
    """What is kept besides metrics.jsonl, and where else it goes."""

    wandb: Wandb | None = None
    """Weights & Biases."""
    rollouts: Rollouts | None = untouched(Rollouts)
    """Rollouts that the report shows word by word; nothing: none are kept."""


class Stack(Model):
    """One run: supervised learning, reinforcement learning, or both."""

    version: Literal[1]
    """Version of this language."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    """Root of all randomness: prompts, samples, first weights. Below 2³², which is what vLLM takes."""
    device: Literal["cpu", "cuda"] | None = None
    """Derived: cuda where `resources` asks for accelerators, else cpu."""
    model: ModelSource
    """Which language model is trained, and where its first weights come from."""
    roles: Roles
    trainer: Trainer = untouched(Trainer)
    inference: Inference = untouched(Inference)
    weights: Weights = untouched(PullWeights)
    """How new weights reach the engines."""
    algorithm: Algorithm = untouched(Algorithm)
    environments: list[Environment] = []
    """What is learnt: the mix that prompts are drawn from. Stages with `data` need none."""
    sampling: Sampling = untouched(Sampling)
    stages: list[Stage] = Field(min_length=1)
    """What happens one after the other: supervised stages, then stages of reinforcement learning."""
    evaluate: Evaluate | None = None
    """Held-out environments, run now and then on the current version."""
    checkpoint: Checkpoint = untouched(Checkpoint)
    limits: Limits = untouched(Limits)
    guards: Guards = untouched(Guards)
    monitors: Monitors = untouched(Monitors)


class StageSettings(Model):
    """What holds during one stage: the stack's values with the stage's changes applied."""

    algorithm: Algorithm
    environments: list[Environment]
    sampling: Sampling
    optimizer: Optimizer


def settings_of(stack: Stack, stage: Stage) -> StageSettings:
    """The values that hold during ``stage``. Raises pydantic.ValidationError where the merge is not valid."""
    rl = isinstance(stage, RlStage)
    return StageSettings(
        algorithm=changed(stack.algorithm, stage.algorithm if rl else None),
        environments=stage.environments or stack.environments,
        sampling=changed(stack.sampling, stage.sampling if rl else None),
        optimizer=changed(stack.trainer.optimizer, stage.optimizer),
    )


class EnvironmentSettings(Model):
    """What holds for one environment during a stage: the stage's values with the environment's own."""

    group_size: int
    sampling: Sampling
    advantage: Advantage
    component: Component


def settings_of_environment(settings: StageSettings, environment: Environment) -> EnvironmentSettings:
    """The values that hold for ``environment`` where ``settings`` hold. Raises pydantic.ValidationError."""
    algorithm = settings.algorithm
    return EnvironmentSettings(
        group_size=environment.group_size or algorithm.group_size,
        sampling=changed(settings.sampling, environment.sampling),
        advantage=environment.advantage or algorithm.advantage,
        component=environment.component,
    )


def environment_settings(settings: StageSettings) -> dict[str, EnvironmentSettings]:
    """What holds for each environment of a stage, by its name."""
    return {
        environment.name: settings_of_environment(settings, environment)
        for environment in settings.environments
    }


def longest_rollout(stack: Stack) -> float:
    """Seconds that a rollout may take in any stage, of training or of an evaluation."""
    seconds = []
    for stage in stack.stages:
        settings = settings_of(stack, stage)
        evaluated = stack.evaluate.environments if stack.evaluate else []
        seconds.append(settings.sampling.timeout)
        seconds += [
            settings_of_environment(settings, environment).sampling.timeout
            for environment in [*settings.environments, *evaluated]
        ]
    return max(seconds)
