"""The time of a step on a candidate's machines, and the split of them on which nobody would wait for long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf

from stackrl.runtime.launch.planning import steptime
from stackrl.runtime.launch.planning.accelerators import Accelerator, accelerator_of
from stackrl.runtime.launch.planning.memory import Cache, RoleMemory, trainer_role
from stackrl.runtime.launch.planning.steptime import Engines, Lengths, Passes, Ranks, StepTime
from stackrl.runtime.launch.planning.work import Work, work_of
from stackrl.runtime.trainer.models.shape import Shape
from stackrl.schemas import skypilot, split
from stackrl.schemas.algorithm import Algorithm
from stackrl.schemas.degrees import degrees_of
from stackrl.schemas.pools import gpus_of_engine, inference_of
from stackrl.schemas.shapes import shape_of
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import Stage

_WORTH_TELLING = 0.9
"""Another split is named where its step takes at most so much of this one's time."""
_QUANTISED = {"fp8": 1.0}
"""Bytes of a weight."""


class NotEstimated(Exception):
    """Nobody can say how long a step takes; the text says why."""


@dataclass(frozen=True)
class Estimate:
    """Of the stage with the most steps."""

    stage: str
    lengths: Lengths
    step: StepTime
    better: Split | None
    """None: no other split of the same machines is much faster and fits."""


@dataclass(frozen=True)
class Split:
    """Another division of the same machines."""

    unit: str
    """nodes or gpus."""
    counts: Mapping[str, int]
    """By role."""
    seconds: float
    """Of a step."""

    def __str__(self) -> str:
        return ", ".join(f"{name}: {{{self.unit}: {count}}}" for name, count in self.counts.items())


def estimate(
    stack: Stack,
    task: Task,
    accelerators: Mapping[str, str],
    memory: Sequence[RoleMemory],
    reply: float | None = None,
) -> Estimate:
    """``accelerators``: each role's GPU, empty where it has none; ``memory``: what memory_of says for them;
    ``reply``: the mean tokens that a rollout samples, where they are known.

    Raises NotEstimated.
    """
    known = shape_of(stack.model)
    if known is None:
        raise NotEstimated("nothing here says what the model is made of")
    stage = _longest(stack)
    settings = settings_of(stack, stage)
    situation = _Situation(
        known.shape,
        work_of(known.shape),
        task,
        accelerators,
        stage,
        settings.algorithm,
        steptime.lengths_of(stack, stage, settings, reply),
        {role.role: role.cache for role in memory if role.cache is not None},
        sum(sum(role.host.values()) for role in memory if role.role == "trainer"),
    )
    step = situation.step_of(stack)
    return Estimate(stage.name, situation.lengths, step, _better(stack, situation, step.seconds))


@dataclass(frozen=True)
class _Situation:
    """What does not change with the split."""

    shape: Shape
    work: Work
    task: Task
    accelerators: Mapping[str, str]
    stage: Stage
    algorithm: Algorithm
    """Of the stage."""
    lengths: Lengths
    caches: Mapping[str, Cache]
    host: int
    """Bytes in the memory of a machine that a rank of the trainer takes."""

    def step_of(self, stack: Stack) -> StepTime:
        ranks = self._ranks(stack)
        if self.stage.type != "rl":
            seconds = steptime.training_seconds(self.work, ranks, self.lengths, self.stage.batch_size)
            return StepTime(0.0, seconds, 0.0, overlapping=False)
        rollouts, ahead = self.algorithm.batch_size, self.algorithm.max_staleness
        pools = {name: self._pool(stack, name) for name, _ in split.roles_of(stack) if name != "trainer"}
        return StepTime(
            generation=self._generation(pools, rollouts, rollouts * (1 + ahead), ahead),
            training=steptime.training_seconds(self.work, ranks, self.lengths, rollouts),
            transfer=steptime.transfer_seconds(
                self.work,
                stack.weights.transport,
                sum(pool.number * pool.gpus for pool in pools.values()),
                ranks.accelerator.network_bandwidth,
            ),
            overlapping=ahead > 0 and not any(role.share for name, role in _engine_roles(stack)),
        )

    def trainer_fits(self, stack: Stack) -> bool:
        """In its GPUs; and beside them in what machines have: as much memory as their GPUs, or what the split
        takes as it is."""
        ranks = split.trainer_ranks(stack, self.task)
        role = trainer_role(stack, self.shape, ranks, self.accelerators["trainer"])
        beside = sum(role.host.values())
        return not role.lacking and beside <= max(self.host, self._accelerator("trainer").memory)

    def _generation(self, pools: Mapping[str, Engines], rollouts: int, in_flight: int, ahead: int) -> float:
        decode = pools.get("decode") or pools["inference"]
        prefill = pools.get("prefill") or decode
        decoding = steptime.decoding_seconds(self.work, decode, self.lengths, rollouts, in_flight)
        if not ahead:  # the longest reply is waited for, at last alone
            alone = steptime.iteration_seconds(self.work, decode, 1.0, self.lengths.whole)
            decoding = max(decoding, self.lengths.longest * alone)
        prefilling = steptime.prefill_seconds(self.work, prefill, self.lengths, rollouts)
        return decoding + prefilling if prefill is decode else max(decoding, prefilling)

    def _ranks(self, stack: Stack) -> Ranks:
        count, trainer = split.trainer_ranks(stack, self.task), stack.trainer
        nodes = split.nodes_of_role(stack, self.task, "trainer")
        return Ranks(
            degrees=degrees_of(stack, count),
            per_node=count // max(nodes, 1),
            accelerator=self._accelerator("trainer"),
            tokens=trainer.sequence_length,
            passes=Passes.of(trainer),
            gathered_twice=trainer.reshard_after_forward,
            offloaded=trainer.optimizer_offload,
            adapters=trainer.lora is not None,
        )

    def _pool(self, stack: Stack, name: str) -> Engines:
        inference, gpus = inference_of(stack, name), split.gpus_of_role(stack, self.task, name)
        if (cache := self.caches.get(name)) is None:
            raise NotEstimated(f"nothing says how large the cache of {name} is")
        return Engines(
            number=max(gpus // inference.tensor_parallel, 1),
            gpus=inference.tensor_parallel,
            accelerator=self._accelerator(name),
            cache=cache,
            weight_bytes=_QUANTISED.get(inference.quantization or "", 2.0),
            most_requests=inference.max_requests,
        )

    def _accelerator(self, role: str) -> Accelerator:
        name = self.accelerators[role]
        if not name:
            raise NotEstimated("there are no figures for work without GPUs")
        if (found := accelerator_of(name)) is None:
            raise NotEstimated(f"there are no figures for a GPU called {name}")
        return found


def _longest(stack: Stack) -> Stage:
    """The RL stage with most steps, or, without any, the supervised one."""
    stages = [stage for stage in stack.stages if stage.type == "rl"] or list(stack.stages)
    return max(stages, key=lambda stage: stage.steps or 0)


def _engine_roles(stack: Stack) -> list[tuple[str, split.EngineRole]]:
    return [(name, role) for name, role in split.roles_of(stack) if name != "trainer"]


def _better(stack: Stack, situation: _Situation, now: float) -> Split | None:
    """The fastest other split of the same machines that fits into their memory, if it is worth telling."""
    timed = [
        (seconds, other)
        for other in _other_splits(stack, situation.task)
        if (seconds := situation.step_of(other.stack).seconds) <= _WORTH_TELLING * now
    ]
    # the more ranks share the weights, the less each of them holds: from some split on all fit
    first = bisect_left(timed, True, key=lambda one: situation.trainer_fits(one[1].stack))
    seconds, best = min(timed[first:], key=lambda one: one[0], default=(inf, None))
    return best and Split(best.unit, best.counts, seconds)


@dataclass(frozen=True)
class _Other:
    """A split of the same machines."""

    stack: Stack
    unit: str
    counts: Mapping[str, int]


def _other_splits(stack: Stack, task: Task) -> Iterator[_Other]:
    """Every division of the same machines that the degrees allow, the smallest trainer first. Machines of
    different kinds are not exchanged, nor is a GPU divided that trainer and engines share."""
    engines = dict(_engine_roles(stack))
    if not engines or split.is_mixed(stack) or any(role.share for role in engines.values()):
        return
    unit = "nodes" if stack.roles.trainer.nodes else "gpus"
    per_unit = skypilot.gpus_of_node(task)[0][1] if unit == "nodes" else 1
    sizes = {name: split.gpus_of_role(stack, task, name) // per_unit for name, _ in split.roles_of(stack)}
    for trainer in range(1, sum(sizes.values()) - len(engines) + 1):
        left = sum(sizes.values()) - trainer
        counts = {"trainer": trainer, **_dealt(left, {name: sizes[name] for name in engines})}
        roles = stack.roles.model_copy(
            update={
                name: getattr(stack.roles, name).model_copy(update={unit: count})
                for name, count in counts.items()
            }
        )
        if trainer != sizes["trainer"] and _divides(stack, counts, per_unit):
            yield _Other(stack.model_copy(update={"roles": roles}), unit, counts)


def _dealt(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """``total`` over the pools in proportion to their present sizes, at least one each."""
    names = list(sizes)
    dealt = {name: max(floor(total * size / sum(sizes.values())), 1) for name, size in sizes.items()}
    last = max(names, key=lambda name: dealt[name])
    return dealt | {last: dealt[last] + total - sum(dealt.values())}


def _divides(stack: Stack, counts: Mapping[str, int], per_unit: int) -> bool:
    parallel = stack.trainer.parallel
    ranks, replicate = counts["trainer"] * per_unit, parallel.replicate or 1
    if any(ranks % (replicate * (degree or 1)) for degree in (parallel.context, parallel.expert)):
        return False
    return all(
        count * per_unit % gpus_of_engine(stack, name) == 0
        for name, count in counts.items()
        if name != "trainer"
    )
