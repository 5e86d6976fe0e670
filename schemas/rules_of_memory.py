"""A stack has to fit into the memory of its machines. schemas/rules.py registers these rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stackrl.schemas import split
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.shapes import shape_of
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]


def accelerators_are_known(stack: Stack, task: Task) -> Problems:
    """A name that is nearly that of a GPU is most likely meant to be it. Others may be known to the cloud."""
    from stackrl.runtime.launch.planning.accelerators import accelerator_of, similar

    for path, name, at_key in _accelerators(stack, task):
        if accelerator_of(name) is None and (meant := similar(name)):
            what = f"there is no GPU {name}"
            yield Problem(path, what, f"did you mean {meant}? `sky gpus list` names all", at_key=at_key)


def model_fits(stack: Stack, task: Task) -> Problems:
    """On every kind of GPU that the stack allows. Asked of a stack that is right in everything else."""
    from stackrl.runtime.launch.planning import fits
    from stackrl.runtime.launch.planning.memory import memory_of

    known = shape_of(stack.model)
    if known is None:
        return
    kinds = {kind: None for name, _ in split.roles_of(stack) for kind in _kinds(stack, task, name)}
    refused: set[tuple[str, str | None]] = set()
    for kind in kinds or [None]:
        for role in memory_of(stack, task, kind):
            if not role.lacking or (role.role, role.accelerator) in refused:
                continue
            refused.add((role.role, role.accelerator))
            if role.role == "trainer":
                ranks = split.trainer_ranks(stack, task)
                mend = fits.trainer_mend(stack, known.shape, ranks, role)
            else:
                gpus = split.gpus_of_role(stack, task, role.role)
                mend = fits.engine_mend(stack, known.shape, gpus, role)
            yield Problem(at("roles", role.role), f"{known.name} {fits.told(role)}", mend)


def _kinds(stack: Stack, task: Task, name: str) -> list[str]:
    if split.device_of(stack, task) == "cpu":
        return []
    return [kind for kind, _ in split.kinds_of_role(stack, task, name)]


def _accelerators(stack: Stack, task: Task) -> Iterator[tuple[Path, str, bool]]:
    """Where each is named, its name, and whether that is a key."""
    yield from _named(task.get("resources") or {}, ("resources",))
    for name, role in split.roles_of(stack):
        yield from _named(role.resources or {}, at("roles", name, "resources"))


def _named(resources: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, str, bool]]:
    yield from _in_value(resources.get("accelerators"), (*path, "accelerators"))
    for key in ("any_of", "ordered"):
        for index, choice in enumerate(resources.get(key) or []):
            yield from _in_value(choice.get("accelerators"), (*path, key, index, "accelerators"))


def _in_value(value: Any, path: Path) -> Iterator[tuple[Path, str, bool]]:
    if isinstance(value, str):
        yield path, value.partition(":")[0].strip(), False
    elif isinstance(value, Mapping):
        yield from (((*path, name), name, True) for name in value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _in_value(item, (*path, index))
