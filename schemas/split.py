"""How `roles:` and SkyPilot's machines become numbers: for the rules and for the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stackrl.schemas import skypilot
from stackrl.schemas.roles import EngineRole, TrainerRole
from stackrl.schemas.stack import Stack

Task = Mapping[str, Any]


def roles_of(stack: Stack) -> list[tuple[str, TrainerRole | EngineRole]]:
    """The roles that are given, by name."""
    return [(name, role) for name, role in stack.roles if role is not None]


def has_engines(stack: Stack) -> bool:
    """Whether there is anybody to sample, and to take the trainer's weights for it."""
    return any(name != "trainer" for name, _ in roles_of(stack))


def is_mixed(stack: Stack) -> bool:
    """Whether roles have machines of their own kind."""
    return any(role.resources for _, role in roles_of(stack))


def resources_of_role(stack: Stack, task: Task, name: str) -> dict[str, Any]:
    """SkyPilot's `resources` for the nodes of a role: the task's, with the role's own laid over them."""
    return skypilot.laid_over(task.get("resources") or {}, getattr(stack.roles, name).resources or {})


def kinds_of_role(stack: Stack, task: Task, name: str) -> list[tuple[str, int]]:
    """(GPU, count per node) of every kind of machine that a role may get; empty without accelerators."""
    return skypilot.gpus_of(resources_of_role(stack, task, name))


def device_of(stack: Stack, task: Task) -> str:
    """`cpu` or `cuda`: as said, else cuda where accelerators are asked for."""
    asked = any(kinds_of_role(stack, task, name) for name, _ in roles_of(stack))
    return stack.device or ("cuda" if asked else "cpu")


def gpus_of_role(stack: Stack, task: Task, name: str) -> int:
    """GPUs over all nodes of a role; 0 on CPU or where the split is not known."""
    role = getattr(stack.roles, name)
    kinds = kinds_of_role(stack, task, name) if role is not None else []
    if not kinds or device_of(stack, task) == "cpu":
        return 0
    per_node = kinds[0][1]
    if getattr(role, "share", None):
        return 1
    if role.gpus is not None:
        return _count(stack, name, "gpus", per_node)
    return _count(stack, name, "nodes", skypilot.nodes(task)) * per_node if role.nodes is not None else 0


def nodes_of_role(stack: Stack, task: Task, name: str) -> int:
    """Whole nodes of a role; 0 where it has GPUs or processes of the one node."""
    role = getattr(stack.roles, name)
    return (
        _count(stack, name, "nodes", skypilot.nodes(task))
        if role is not None and role.nodes is not None
        else 0
    )


def trainer_ranks(stack: Stack, task: Task) -> int:
    """Processes of the trainer: one per GPU, or as many as are asked for."""
    gpus = gpus_of_role(stack, task, "trainer")
    return gpus or stack.roles.trainer.processes or nodes_of_role(stack, task, "trainer")


def _count(stack: Stack, name: str, unit: str, total: int) -> int:
    count = getattr(getattr(stack.roles, name), unit)
    if count != "rest":
        return count
    others = [getattr(role, unit) for other, role in roles_of(stack) if other != name]
    return max(total - sum(other for other in others if isinstance(other, int)), 0)
