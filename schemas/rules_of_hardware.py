"""Rules over the machines of roles: `roles.<name>.resources`. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas import skypilot
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, is_mixed, kinds_of_role, roles_of
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]


def machines_are_skypilots(stack: Stack) -> Problems:
    """A role's `resources` are checked against SkyPilot's own schema, as the task's are."""
    if not is_mixed(stack):
        return
    from stackrl.schemas.jsonschema_words import problems_by

    schema = skypilot.task_schema()["properties"]["resources"]
    for name, role in roles_of(stack):
        if role.resources:
            yield from problems_by(schema, role.resources, at("roles", name, "resources"))


def own_machines_are_whole(stack: Stack, task: Task) -> Problems:
    """Machines of a role's own are nodes: a part of one node cannot be of another kind."""
    for name, role in roles_of(stack):
        if role.resources and role.nodes is None:
            what = f"machines of a role's own are whole nodes, and {name} counts none"
            mend = f"say {name}: {{nodes: 1, resources: …}}, and the same unit for the other roles"
            yield Problem(at("roles", name, "resources"), what, mend, at_key=True)


def own_machines_are_of_one_kind(stack: Stack, task: Task) -> Problems:
    """All ranks of a role compute on the same GPU; a choice between kinds would make one plan into many."""
    if not is_mixed(stack):
        return
    for name, role in roles_of(stack):
        kinds = dict.fromkeys(kinds_of_role(stack, task, name))
        if len(kinds) > 1:
            told = " or ".join(f"{gpu}:{count}" for gpu, count in kinds)
            gpu, count = next(iter(kinds))
            where = at("roles", name, *(["resources"] if role.resources else []))
            what = f"two kinds of GPU in one role: {told}"
            mend = f"name one for {name}, as in resources: {{accelerators: '{gpu}:{count}'}}"
            yield Problem(where, what, mend)


def machines_end_alike(stack: Stack, task: Task) -> Problems:
    """SkyPilot refuses alternatives that differ in what becomes of their machines."""
    resources = task.get("resources") or {}
    ends = [choice.get("autostop") for choice in skypilot.choices_of(resources)]
    if any(end != ends[0] for end in ends):
        key = next(key for key in skypilot.CHOICES if resources.get(key))
        what = "alternatives have different `autostop`, which SkyPilot does not take"
        yield Problem(("resources", key), what, f"say it once, beside `{key}`", at_key=True)


def all_roles_compute_alike(stack: Stack, task: Task) -> Problems:
    """A run has one device: either every role has GPUs or none has."""
    if not is_mixed(stack) or stack.device == "cpu":
        return
    without = [name for name, _ in roles_of(stack) if not kinds_of_role(stack, task, name)]
    if without and len(without) < len(roles_of(stack)):
        what = "has no GPUs, and other roles have: a run computes on one kind of device"
        mend = "say resources: {accelerators: …} for it too"
        yield Problem(at("roles", without[0]), what, mend)
