"""What an engine of each pool is made of: its pool's own words under `roles:`, else those of `inference:`."""

from __future__ import annotations

from stackrl.schemas.inference import Inference
from stackrl.schemas.roles import EngineRole, Pool
from stackrl.schemas.stack import Stack

POOLS: tuple[Pool, ...] = ("inference", "prefill", "decode")


def role_of(stack: Stack, pool: Pool) -> EngineRole:
    """Raises KeyError where the stack has no such pool."""
    role = getattr(stack.roles, pool)
    if role is None:
        raise KeyError(pool)
    return role


def inference_of(stack: Stack, pool: Pool) -> Inference:
    """`inference:` as it is for the pool's engines. Its arguments are written with dashes."""
    role = role_of(stack, pool)
    written = {**_dashed(stack.inference.arguments), **_dashed(role.arguments)}
    width = role.tensor_parallel or stack.inference.tensor_parallel
    return stack.inference.model_copy(update={"tensor_parallel": width, "arguments": written})


def gpus_of_engine(stack: Stack, pool: Pool) -> int:
    """GPUs of one engine; on CPUs, its processes that compute."""
    return inference_of(stack, pool).tensor_parallel * role_of(stack, pool).data_parallel


def _dashed(arguments: dict[str, object]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in arguments.items()}
