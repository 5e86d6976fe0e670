"""A stack on mixed hardware as a group of jobs of SkyPilot: one task for each role, started together.

All of them run `stackrl node`. They find each other by the names that SkyPilot gives to the nodes of a group,
which it does on Kubernetes only.
"""

from __future__ import annotations

from typing import Any

from stackrl.runtime.launch.sky.task import ANYWHERE, Launch, pinned, recovering, submitted
from stackrl.runtime.place import ADDRESSES_VARIABLE, RANK_VARIABLE
from stackrl.runtime.run import RunError
from stackrl.schemas import skypilot
from stackrl.schemas.split import Task, nodes_of_role, resources_of_role, roles_of
from stackrl.schemas.stack import Stack

GROUP_VARIABLE = "SKYPILOT_JOBGROUP_NAME"
KUBERNETES = ("k8s", "kubernetes")
_REST_SECONDS = 30
"""Time that the other roles have to end by themselves after the trainer has."""


def documents(task: Task, stack: Stack, launch: Launch, infra: str) -> list[dict[str, Any]]:
    """The group's header and its tasks. Raises RunError where roles could not find each other."""
    roles = [name for name, _ in roles_of(stack)]
    counts = {name: nodes_of_role(stack, task, name) for name in roles}
    header = {
        "name": launch.name,
        "execution": "parallel",
        "primary_tasks": ["trainer"],
        "termination_delay": f"{_REST_SECONDS}s",
        "inter_connection": True,
    }
    tasks = []
    for name in roles:
        made = submitted(task, launch)
        made["name"], made["num_nodes"] = name, counts[name]
        made["resources"] = recovering(_on_kubernetes(resources_of_role(stack, task, name), infra, launch))
        first = sum(counts[other] for other in roles[: roles.index(name)])
        made["run"] = _exports(counts, first) + (task.get("run") or "")
        tasks.append(made)
    return [header, *tasks]


def _on_kubernetes(resources: dict[str, Any], infra: str, launch: Launch) -> dict[str, Any]:
    choices = skypilot.choices_of(resources)
    places = [skypilot.infra_of(choice).partition("/")[0].lower() for choice in choices]
    asked = infra.partition("/")[0].lower()
    if infra == ANYWHERE and any(place in (*KUBERNETES, "", "*") for place in places):
        infra = asked = KUBERNETES[0]
    if asked not in KUBERNETES:
        where = "these resources name no Kubernetes cluster" if infra == ANYWHERE else f"not on {infra}"
        raise RunError(
            f"roles with machines of different kinds find each other on Kubernetes and on Slurm, {where}; "
            "use --infra k8s or --infra slurm, or machines of one kind (no roles.<name>.resources)"
        )
    return pinned(resources, infra)


def _exports(counts: dict[str, int], first: int) -> str:
    """Shell: which of the run's nodes this is, and where all of them are."""
    hosts = [f"{name}-{node}.${GROUP_VARIABLE}" for name, count in counts.items() for node in range(count)]
    return (
        f'export {ADDRESSES_VARIABLE}="{",".join(hosts)}"\n'
        f"export {RANK_VARIABLE}=$(({first} + SKYPILOT_NODE_RANK))\n"
    )
