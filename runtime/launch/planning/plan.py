"""Which processes a run has, on which node, with which cores and GPUs. Pure: nothing is started or asked.

Roles become processes: an engine per `tensor_parallel` × `data_parallel` GPUs (or per process), a trainer
rank per GPU (or per process), and the orchestrator beside trainer rank 0 on node 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stackrl.schemas import skypilot, split
from stackrl.schemas.degrees import Degrees, degrees_of
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.pools import POOLS, gpus_of_engine
from stackrl.schemas.stack import Stack

if TYPE_CHECKING:
    from stackrl.runtime.run import RunFolder

ENGINE, TRAINER, ORCHESTRATOR = "engine", "trainer", "orchestrator"
RUN = "RUN"
"""Stands for the run's folder in a planned command."""


@dataclass(frozen=True)
class Machine:
    """What a node offers."""

    cores: tuple[int, ...]
    gpus: int = 0

    @classmethod
    def here(cls) -> Machine:
        """The cores that this process may run on, and the GPUs whose device files there are."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(
            cores, len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
        )


@dataclass(frozen=True)
class Process:
    """One process of a run. Its environment holds no secret."""

    role: str
    """engine, trainer or orchestrator."""
    index: int
    """Among the processes of its role: the engine's number, the trainer's rank."""
    node: int
    pool: str
    """The key under `roles:` that it belongs to: trainer, inference, prefill or decode."""
    command: Sequence[str]
    """Arguments after the Python interpreter; RUN stands for the run's folder."""
    environment: dict[str, str] = field(default_factory=dict)
    ports: Sequence[str] = ()
    """Sockets that it opens. Their numbers are chosen when the run starts."""
    cores: Sequence[int] = ()
    """Cores that it computes on; empty: wherever there is room."""
    gpus: Sequence[int] = ()
    """GPUs of its node."""

    @property
    def name(self) -> str:
        return self.role if self.role == ORCHESTRATOR else f"{self.role}-{self.index}"

    def command_for(self, run: RunFolder) -> list[str]:
        """What is started for a run, with the interpreter of this process."""
        return [sys.executable, *(str(run.path) if part == RUN else part for part in self.command)]


@dataclass(frozen=True)
class Pool:
    """A role of the stack: its processes' share of the machines."""

    name: str
    """The key under `roles:`."""
    nodes: Sequence[int]
    accelerator: str
    """The GPU, or `A or B` where the stack leaves the choice; empty without GPUs."""
    gpus_per_node: int
    """GPUs of each of these nodes that the role computes on."""
    processes: int
    """Engines or trainer ranks."""


@dataclass(frozen=True)
class Plan:
    """Everything that runs."""

    name: str
    device: str
    nodes: int
    gpus_per_node: int
    """GPUs of a node; where roles have nodes of their own kinds, the most that one of them has."""
    accelerator: str
    """The GPU; of several `A or B`, where one of them is chosen, and `A and B`, where roles differ."""
    parallel: Degrees
    tensor_parallel: int
    processes: Sequence[Process]
    pools: Sequence[Pool] = ()


def make_plan(loaded: LoadedStack, machine: Machine | None = None) -> Plan:
    """Plan a stack. ``machine`` gives the cores that are dealt on each node; by default this machine's."""
    stack, task = loaded.stack, loaded.task
    device = split.device_of(stack, task)
    ranks = split.trainer_ranks(stack, task)
    processes = _trainer(stack, task, ranks, device) + _engines(stack, task, device) + [_orchestrator()]
    if device == "cpu":
        processes = deal_cores(processes, (machine or Machine.here()).cores)
    kinds = {name: split.kinds_of_role(stack, task, name) for name, _ in split.roles_of(stack)}
    if device == "cpu":
        kinds = {name: [] for name in kinds}
    return Plan(
        name=loaded.name,
        device=device,
        nodes=skypilot.nodes(task),
        gpus_per_node=max((count for found in kinds.values() for _, count in found), default=0),
        accelerator=" and ".join(dict.fromkeys(filter(None, map(_names, kinds.values())))),
        parallel=degrees_of(stack, ranks),
        tensor_parallel=stack.inference.tensor_parallel,
        processes=processes,
        pools=[_pool(name, _names(found), processes) for name, found in kinds.items()],
    )


def lacking(plan: Plan, machine: Machine) -> str:
    """What ``machine`` lacks to run ``plan`` by itself; empty where it can."""
    if plan.nodes > 1:
        return f"the run needs {plan.nodes} nodes, this is one machine"
    if plan.gpus_per_node > machine.gpus:
        return (
            f"the run needs {plan.gpus_per_node} GPUs ({plan.accelerator}), this machine has {machine.gpus}"
        )
    return ""


def deal_cores(processes: Sequence[Process], cores: Sequence[int]) -> list[Process]:
    """Give each engine and trainer rank cores of its own, engines first; too few cores are shared in turn.

    The orchestrator computes little and gets none.
    """
    takers = sorted(
        (p for p in processes if p.role != ORCHESTRATOR), key=lambda p: (p.node, p.role != ENGINE, p.index)
    )
    dealt: dict[str, list[int]] = {}
    for node in {process.node for process in takers}:
        here = [process.name for process in takers if process.node == node]
        for position, core in enumerate(cores[: max(len(cores), len(here))]):
            if len(cores) >= len(here):
                # neighbouring cores share caches, so each process gets a run of them
                dealt.setdefault(here[position * len(here) // len(cores)], []).append(core)
        if len(cores) < len(here):
            dealt |= {name: [cores[position % len(cores)]] for position, name in enumerate(here)}
    return [_with_cores(process, dealt.get(process.name, [])) for process in processes]


def _with_cores(process: Process, cores: Sequence[int]) -> Process:
    values = {name: getattr(process, name) for name in Process.__dataclass_fields__}
    return Process(**{**values, "cores": tuple(cores)})


def _names(kinds: Sequence[tuple[str, int]]) -> str:
    return " or ".join(dict.fromkeys(name for name, _ in kinds))


def _pool(name: str, accelerator: str, processes: Sequence[Process]) -> Pool:
    own = [process for process in processes if process.pool == name and process.role != ORCHESTRATOR]
    nodes = sorted({process.node for process in own})
    gpus = {gpu for process in own if process.node in nodes[:1] for gpu in process.gpus}
    return Pool(name, nodes, accelerator, len(gpus), len(own))


def _trainer(stack: Stack, task: split.Task, ranks: int, device: str) -> list[Process]:
    per_node = max(ranks // max(split.nodes_of_role(stack, task, "trainer"), 1), 1)
    return [
        Process(
            role=TRAINER,
            index=rank,
            node=rank // per_node,
            pool="trainer",
            command=("-m", "stackrl.runtime.trainer", RUN),
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": str(ranks)},
            ports=() if rank else ("weights", "rendezvous") if split.has_engines(stack) else ("rendezvous",),
            gpus=(rank % per_node,) if device == "cuda" else (),
        )
        for rank in range(ranks)
    ]


def _engines(stack: Stack, task: split.Task, device: str) -> list[Process]:
    """Engines take the nodes, or the GPUs of the one node, that come after the trainer's."""
    node = split.nodes_of_role(stack, task, "trainer")
    gpu = split.gpus_of_role(stack, task, "trainer") if node == 0 else 0
    engines: list[Process] = []
    for pool in POOLS:
        role = getattr(stack.roles, pool)
        if role is None:
            continue
        nodes, first = split.nodes_of_role(stack, task, pool), 0 if role.share else gpu
        width, own = gpus_of_engine(stack, pool), () if pool == "inference" else ("--pool", pool)
        gpus = split.gpus_of_role(stack, task, pool)
        count = max(gpus // width, 1) if device == "cuda" else (role.processes or nodes)
        per_node = max(count // nodes, 1) if nodes else count
        for number in range(count):
            start = first + (number % per_node) * width
            index = len(engines)
            engines.append(
                Process(
                    role=ENGINE,
                    index=index,
                    node=node + number // per_node if nodes else 0,
                    pool=pool,
                    command=("-m", "stackrl.runtime.inference", RUN, "--engine", str(index), *own),
                    ports=("engine", "keys") if own else ("engine",),
                    gpus=tuple(range(start, start + width)) if device == "cuda" else (),
                )
            )
        node += nodes
        gpu += 0 if nodes or role.share else count * width
    return [_seeing_gpus(engine) for engine in engines]


def _seeing_gpus(process: Process) -> Process:
    if process.gpus:
        process.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process.gpus))
    return process


def _orchestrator() -> Process:
    command = ("-m", "stackrl.runtime.orchestrator", RUN)
    return Process(role=ORCHESTRATOR, index=0, node=0, pool="trainer", command=command, ports=("batches",))
