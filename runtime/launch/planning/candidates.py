"""Every kind of machine that a stack's `resources` allow, one by one: what SkyPilot would choose from.

`any_of` and `ordered` are lists of alternatives, and so are several `accelerators`; an alternative inherits
what stands beside the list. A role with `resources` of its own has them laid over each alternative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from stackrl.schemas import skypilot
from stackrl.schemas.split import Task, is_mixed, nodes_of_role, resources_of_role, roles_of
from stackrl.schemas.stack import Stack


@dataclass(frozen=True)
class Kind:
    """One kind of machine, in SkyPilot's words; what is empty is left open."""

    infra: str = ""
    """Where: aws, aws/us-west-2, k8s/context, slurm/cluster/partition."""
    accelerator: str = ""
    gpus: int = 0
    """Of one machine."""
    spot: bool = False
    image: str = ""
    """The container or machine image; of several, one per region, the first."""
    instance_type: str = ""
    cpus: str = ""
    """`8`, or `8+`: at least."""
    memory: str = ""
    """GiB: `32`, `32+`, or `4x`: times the vCPUs."""

    @property
    def cloud(self) -> str:
        """The first part of `infra`; empty where any will do."""
        return "" if self.infra.startswith("*") else self.infra.split("/")[0].lower()

    def __str__(self) -> str:
        machine = f"{self.accelerator}:{self.gpus}" if self.gpus else self.instance_type or self._size()
        return f"{self.infra or 'anywhere,'} {machine}{' spot' if self.spot else ''}"

    def _size(self) -> str:
        said = [f"{self.cpus} CPUs" * bool(self.cpus), f"{self.memory} GiB" * bool(self.memory)]
        return ", ".join(filter(None, said)) or "no GPUs"


@dataclass(frozen=True)
class Group:
    """Equal machines."""

    kind: Kind
    nodes: int
    roles: tuple[str, ...]
    """Who works on them."""


@dataclass(frozen=True)
class Candidate:
    """One set of machines on which the whole run would fit its roles: a group, or one for each role."""

    groups: tuple[Group, ...]

    def kind_of(self, role: str) -> Kind:
        return next(group.kind for group in self.groups if role in group.roles)

    def __str__(self) -> str:
        if len(self.groups) == 1:
            return str(self.groups[0].kind)
        return " + ".join(f"{group.nodes} × {group.kind}" for group in self.groups)


def candidates_of(stack: Stack, task: Task) -> list[Candidate]:
    """In the order of the file; equal ones once. There is always one: a machine of which nothing is said."""
    roles = [name for name, _ in roles_of(stack)]
    if is_mixed(stack):
        found = [
            Candidate(
                tuple(
                    Group(kind, nodes_of_role(stack, task, role), (role,))
                    for role, kind in zip(roles, kinds, strict=True)
                )
            )
            for kinds in _together(stack, task, roles)
        ]
    else:
        nodes = skypilot.nodes(task)
        found = [
            Candidate((Group(kind, nodes, tuple(roles)),)) for kind in kinds_of(task.get("resources") or {})
        ]
    return list(dict.fromkeys(found))


def kinds_of(resources: Mapping[str, Any]) -> list[Kind]:
    """The kinds of machines that SkyPilot's `resources` allow, in their order."""
    return [kind for choice in skypilot.choices_of(resources) for kind in _kinds(choice)]


def _together(stack: Stack, task: Task, roles: list[str]) -> Iterator[tuple[Kind, ...]]:
    """Kinds for all roles at once. Roles take the same alternative of the task: its words on where the run
    goes hold for all of them."""
    for choice in skypilot.choices_of(task.get("resources") or {}):
        told = {**task, "resources": choice}
        yield from product(*(kinds_of(resources_of_role(stack, told, role)) for role in roles))


def _kinds(choice: Mapping[str, Any]) -> Iterator[Kind]:
    for accelerator, gpus in skypilot.gpus_of(choice) or [("", 0)]:
        yield Kind(
            infra=skypilot.infra_of(choice),
            accelerator=accelerator,
            gpus=gpus,
            spot=bool(choice.get("use_spot")),
            image=_image(choice.get("image_id")),
            instance_type=choice.get("instance_type") or "",
            cpus=str(choice.get("cpus") or ""),
            memory=str(choice.get("memory") or ""),
        )


def _image(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(next(iter(value.values()), ""))
    return value or ""
