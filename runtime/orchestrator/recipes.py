"""What the rollouts of a stage are made from: prompts, sampling and the size of their groups.

Where any of it changes while a run stands still, a group that is half done cannot be completed: the rest of
it would be of another prompt, or not comparable. What only says how a batch is trained is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from stackrl.runtime.orchestrator.rollout import Limits
from stackrl.schemas.algorithm import Algorithm
from stackrl.schemas.environments import Environment
from stackrl.schemas.stack import Stack, environment_settings, settings_of
from stackrl.schemas.stages import RlStage
from stackrl.schemas.teachers import looks_at_reference

_HOW_IT_IS_LEARNT = {"advantage", "component", "failures"}
"""Keys of an environment that its rollouts do not depend on."""


def recipes(stack: Stack) -> dict[str, str]:
    """RL stage → a hash that changes with what its rollouts are made from."""
    return {stage.name: _recipe(stack, stage) for stage in stack.stages if isinstance(stage, RlStage)}


def _recipe(stack: Stack, stage: RlStage) -> str:
    settings = settings_of(stack, stage)
    own = environment_settings(settings)
    parts = {
        "seed": stack.seed,
        "environments": [
            environment.model_dump(mode="json", exclude=_HOW_IT_IS_LEARNT)
            | {"group_size": own[environment.name].group_size, "sampling": _limits(stack, stage, environment)}
            | {"reference": _reference(settings.algorithm, environment)}
            for environment in settings.environments
        ],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _reference(algorithm: Algorithm, environment: Environment) -> dict[str, Any] | None:
    """Who tells of the environment's rollouts, or writes them, beside the policy."""
    concerned = looks_at_reference(algorithm, environment.component) or environment.sampled_by == "reference"
    if algorithm.reference is None or not concerned:
        return None
    return algorithm.reference.model_dump(include={"model", "demonstration"})


def _limits(stack: Stack, stage: RlStage, environment: Environment) -> dict[str, Any]:
    limits = asdict(Limits.of(stack, stage, environment))
    del limits["seconds"]  # a rollout over its time is a failure, of no group
    return limits
