"""A plan with more or fewer engines than it was made with. Pure: nothing is started or asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from stackrl.runtime.launch.planning.plan import ENGINE, Process

VISIBLE = "CUDA_VISIBLE_DEVICES"

Plan = dict[str, Any]
"""As plan.json holds it."""


def processes_of(plan: Plan) -> list[Process]:
    return [Process(**process) for process in plan["processes"]]


def engines_of(plan: Plan, pool: str) -> list[Process]:
    """The engines of a pool, by their numbers."""
    found = [one for one in processes_of(plan) if one.role == ENGINE and one.pool == pool]
    return sorted(found, key=lambda process: process.index)


def pools_of(plan: Plan) -> list[str]:
    """The pools that have engines."""
    return list(dict.fromkeys(one.pool for one in processes_of(plan) if one.role == ENGINE))


def nodes_of(plan: Plan, pool: str) -> list[int]:
    """The nodes that the pool was planned on, whether or not it has an engine there now."""
    planned = [node for one in plan.get("pools", ()) if one["name"] == pool for node in one["nodes"]]
    return planned or sorted({engine.node for engine in engines_of(plan, pool)})


def free_gpus(plan: Plan, pool: str, node: int, others: Collection[Process] = ()) -> list[int]:
    """GPUs of a node of ``pool`` that neither the plan nor ``others`` compute on, where all of them are the
    run's."""
    whole = [one["gpus_per_node"] for one in plan.get("pools", ()) if one["name"] == pool]
    total = max(whole, default=0) if plan.get("nodes", 1) > 1 else plan.get("gpus_per_node", 0)
    taken = {gpu for one in [*processes_of(plan), *others] if one.node == node for gpu in one.gpus}
    return [gpu for gpu in range(total) if gpu not in taken]


def another(
    plan: Plan, pool: str, node: int, gpus: Sequence[int], cores: Sequence[int], taken: Collection[int] = ()
) -> Process:
    """One more engine of ``pool``, like those it has, under the lowest number that is in no use. ``taken``:
    numbers of engines that are still leaving."""
    like = engines_of(plan, pool)[-1]
    used = {one.index for one in processes_of(plan) if one.role == ENGINE} | set(taken)
    index = next(number for number in count() if number not in used)
    command = list(like.command)
    command[command.index("--engine") + 1] = str(index)
    environment = dict(like.environment)
    if gpus:
        environment[VISIBLE] = ",".join(map(str, gpus))
    return replace(
        like,
        index=index,
        node=node,
        command=command,
        environment=environment,
        gpus=tuple(gpus),
        cores=tuple(cores),
    )


def with_engine(plan: Plan, engine: Process) -> Plan:
    return _counted({**plan, "processes": [*plan["processes"], asdict(engine)]}, engine.pool)


def without_engine(plan: Plan, engine: Process) -> Plan:
    kept = [one for one in plan["processes"] if (one["role"], one["index"]) != (ENGINE, engine.index)]
    return _counted({**plan, "processes": kept}, engine.pool)


def _counted(plan: Plan, pool: str) -> Plan:
    engines = len(engines_of(plan, pool))
    pools = [one | {"processes": engines} if one["name"] == pool else one for one in plan.get("pools", ())]
    return {**plan, "pools": pools} if pools else plan


def kept(plan: Plan, asked: dict[str, dict[str, int]]) -> tuple[Plan, dict[str, dict[str, int]]]:
    """A new plan with the counts that were asked for while the one before it ran, and what of ``asked`` still
    holds: not where the stack now plans another number of engines, nor where there are no GPUs for them.

    ``asked``: pool → planned and count. The engines' cores are yet to be dealt.
    """
    holds = {}
    for pool, numbers in asked.items():
        if len(engines_of(plan, pool)) != numbers["planned"]:
            continue
        changed = _brought_to(plan, pool, numbers["count"])
        if changed is not None:
            plan, holds[pool] = changed, numbers
    return plan, holds


def _brought_to(plan: Plan, pool: str, wanted: int) -> Plan | None:
    """None where there is no room."""
    for engine in engines_of(plan, pool)[wanted:]:
        plan = without_engine(plan, engine)
    while len(engines := engines_of(plan, pool)) < wanted:
        width = len(engines[-1].gpus)
        rooms = {node: free_gpus(plan, pool, node) for node in nodes_of(plan, pool)}
        if not (fitting := [node for node, free in rooms.items() if len(free) >= width]):
            return None
        node = min(fitting, key=lambda node: sum(engine.node == node for engine in engines))
        plan = with_engine(plan, another(plan, pool, node, rooms[node][:width], engines[-1].cores))
    return plan
