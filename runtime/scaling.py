"""The node program's part of `stackrl scale`: find room for engines, start them, and let others leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stackrl.runtime.launch import scaling
from stackrl.runtime.launch.backends import LOCAL
from stackrl.runtime.launch.devices import Claims, gpus_here
from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.launch.planning import scaled
from stackrl.runtime.launch.planning.plan import Process
from stackrl.runtime.notes import Notes
from stackrl.runtime.restarts import Restarts
from stackrl.runtime.roles import Roles
from stackrl.runtime.run import RunError, RunFolder


class Scaling:
    """Of one attempt."""

    def __init__(self, run: RunFolder, roles: Roles, restarts: Restarts, notes: Notes) -> None:
        self._run, self._roles, self._restarts, self._notes = run, roles, restarts, notes
        self._room = Room(run)
        (run.path / scaling.QUESTION).unlink(missing_ok=True)  # who asked has gone with the attempt before

    def turn(self, said: Mapping[str, Any]) -> None:
        """Look for a question, and answer it. ``said``: the orchestrator's last words."""
        self._roles.see_off(said.get("engines"))
        if not (self._run.path / scaling.QUESTION).exists():
            return
        question = self._run.read(scaling.QUESTION)
        if "answer" in question or "refused" in question:
            return
        try:
            answer = {"answer": self._changed(question["pools"])}
        except (RunError, OSError) as error:
            answer = {"refused": str(error)}
        self._notes.say(f"asked for {_words(question['pools'])}: {' '.join(answer.values())}")
        try:
            self._run.write(scaling.QUESTION, {"id": question["id"], **answer})
        except OSError as error:
            self._notes.complain(f"{self._run.path / scaling.QUESTION} cannot be written: {error.strerror}")

    def _changed(self, wanted: Mapping[str, int]) -> str:
        """Bring the pools to these counts. Raises RunError, before anything is done, and OSError."""
        plan = self._run.read("plan.json")
        if unknown := [pool for pool in wanted if pool not in scaled.pools_of(plan)]:
            pools = " and ".join(scaled.pools_of(plan)) or "no engines"
            raise RunError(f"the run has no pool {unknown[0]}; it has {pools}")
        changes, told = [], []
        for pool, count in wanted.items():
            engines = scaled.engines_of(plan, pool)
            leaves, joins = engines[count:], list[Process]()
            for engine in leaves:
                plan = scaled.without_engine(plan, engine)
            while len(scaled.engines_of(plan, pool)) < count:
                joins.append(self._room.for_another(plan, pool, self._roles.leaving))
                plan = scaled.with_engine(plan, joins[-1])
            changes.append((pool, len(engines), joins, leaves))
            told.append(scaling.words_of(pool, len(engines), joins, leaves))
        self._run.write("plan.json", plan)
        for pool, before, joins, leaves in changes:
            self._do(pool, before, joins, leaves)
        return "; ".join([*told, *self._room.taken_notes()])

    def _do(self, pool: str, before: int, joins: list[Process], leaves: list[Process]) -> None:
        after = before + len(joins) - len(leaves)
        if before == after:
            return
        scaling.note_kept(self._run, pool, before, after)
        for engine in leaves:
            self._restarts.leave(engine.name)
            self._roles.leave(engine.name)
        for engine in joins:
            self._roles.join(engine)
        self._notes.event(
            "scaled",
            pool=pool,
            before=before,
            after=after,
            joins=[engine.name for engine in joins],
            leaves=[engine.name for engine in leaves],
        )


class Room:
    """Devices for engines that join. Those that it takes on this machine are held as long as this lives."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._claims = run, Claims()
        self._notes: list[str] = []

    def taken_notes(self) -> list[str]:
        """What a person should know of the devices that were dealt; each is told once."""
        notes, self._notes = self._notes, []
        return notes

    def for_another(self, plan: scaled.Plan, pool: str, leaving: Mapping[str, Process]) -> Process:
        """One more engine of ``pool`` where there is room for it. Raises RunError."""
        role = getattr(self._run.stack().roles, pool)
        if role is not None and role.share:
            raise RunError(f"{pool} runs on the trainer's own GPU, which has room for one engine")
        engines = scaled.engines_of(plan, pool)
        numbers = [process.index for process in leaving.values()]
        if width := len(engines[-1].gpus):
            node, gpus = self._gpus(plan, pool, width, list(leaving.values()))
            return scaled.another(plan, pool, node, gpus, engines[-1].cores, numbers)
        nodes = scaled.nodes_of(plan, pool)
        node = min(nodes, key=lambda node: sum(engine.node == node for engine in engines))
        cores = self._cores(plan, node, engines[-1], list(leaving.values()))
        return scaled.another(plan, pool, node, (), cores, numbers)

    def _gpus(
        self, plan: scaled.Plan, pool: str, width: int, leaving: list[Process]
    ) -> tuple[int, list[int]]:
        """A node of the pool with that many free GPUs, and which they are. Raises RunError."""
        nodes = scaled.nodes_of(plan, pool)
        free = {node: self._free_gpus(plan, pool, node, width, leaving) for node in nodes}
        for node, gpus in free.items():
            if len(gpus) >= width:
                return node, gpus[:width]
        where = ", ".join(f"node {node} has {len(gpus)}" for node, gpus in free.items())
        soon = "; an engine that is still leaving has some" if leaving else ""
        raise RunError(f"one more {pool} engine needs {width} free GPU(s) on one node: {where}{soon}")

    def _free_gpus(
        self, plan: scaled.Plan, pool: str, node: int, width: int, leaving: list[Process]
    ) -> list[int]:
        if Handle.of(self._run).backend != LOCAL:
            return scaled.free_gpus(plan, pool, node, leaving)
        used = {gpu for process in [*scaled.processes_of(plan), *leaving] for gpu in process.gpus}
        free: list[int] = []
        for gpu in gpus_here(os.environ):
            if (
                len(free) < width
                and gpu.index not in used
                and not gpu.busy
                and self._ours(f"gpu-{gpu.index}")
            ):
                free.append(gpu.index)
        return free

    def _cores(self, plan: scaled.Plan, node: int, like: Process, leaving: list[Process]) -> list[int]:
        """As many as ``like`` has; where none is free, its own, for cores may be shared."""
        if node != 0:
            return list(like.cores)
        used = {core for process in [*scaled.processes_of(plan), *leaving] for core in process.cores}
        local, free = Handle.of(self._run).backend == LOCAL, list[int]()
        for core in sorted(os.sched_getaffinity(0)):
            if len(free) < len(like.cores) and core not in used and (not local or self._ours(f"core-{core}")):
                free.append(core)
        if free:
            return free
        self._notes.append(
            f"no core is free, so it shares {', '.join(map(str, like.cores))} with {like.name}"
        )
        return list(like.cores)

    def _ours(self, device: str) -> bool:
        """Whether this run holds ``device``, from now on or since its launch."""
        holder = self._claims.take(device)
        if holder is None:
            self._claims.sign(self._run.id)
        return holder in (None, f"run {self._run.id}")


def _words(pools: Mapping[str, int]) -> str:
    return ", ".join(f"{pool}={count}" for pool, count in pools.items())
