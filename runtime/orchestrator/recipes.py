"""What the rollouts of a stage are made from: prompts, sampling and the size of their groups.

Where any of it changes while a run stands still, a group that is half done cannot be completed: the rest of
it would be of another prompt, or not comparable. What only says how a batch is trained is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from stackrl.runtime.orchestrator.rollout import Limits
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage


def recipes(stack: Stack) -> dict[str, str]:
    """RL stage → a hash that changes with what its rollouts are made from."""
    return {stage.name: _recipe(stack, stage) for stage in stack.stages if isinstance(stage, RlStage)}


def _recipe(stack: Stack, stage: RlStage) -> str:
    settings, limits = settings_of(stack, stage), asdict(Limits.of(stack, stage))
    del limits["seconds"]  # a rollout over its time is a failure, of no group
    parts = {
        "seed": stack.seed,
        "environments": [environment.model_dump(mode="json") for environment in settings.environments],
        "group_size": settings.algorithm.group_size,
        "limits": limits,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
