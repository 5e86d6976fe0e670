"""An RL stage: groups are admitted, rolled out, sealed into batches and trained, all at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from stackrl.runtime.environments.workers import WorkerLost
from stackrl.runtime.environments.workers.parties import WorkerRefused
from stackrl.runtime.environments.workers.pool import LONGEST_WAIT
from stackrl.runtime.inference.client import EngineLost
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.orchestrator.admission import Admission
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import ENGINE_LIMIT, Engines
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.groups import FinishedGroup, Plan, Rollout
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.references import References
from stackrl.runtime.orchestrator.report import rl_record
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out_somewhere
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.signals import Signals
from stackrl.runtime.orchestrator.tasks import Draw, Mix
from stackrl.runtime.orchestrator.training import Training, Work
from stackrl.runtime.orchestrator.tries import TRIES, seeds_of_try
from stackrl.schemas.stack import Stack, StageSettings, environment_settings
from stackrl.schemas.stages import RlStage

_RETRY_AFTER = 1.0
_ONE_CAUSE = 10.0
"""Seconds within which rollouts that lose the same engine or worker count as one failure."""
_BATCHES_REPLACED = 10
"""Groups, in batches, that may be dropped and replaced in one step before the run gives up."""
_PLANNED_TOGETHER = 16
"""Groups that are written down at once before they begin."""
_REMEDIES = {
    "failed": "see the warnings above",
    "no_signal": "make the task easier or harder, or set algorithm.no_signal: keep",
    "stale": "the engines label their tokens with versions older than they were given; see their logs",
}

log = logging.getLogger(__name__)
AfterStep = Callable[[], Awaitable[None]]


class Reinforcement:
    """One stage. ``run`` it once."""

    def __init__(
        self,
        stage: RlStage,
        done: int,
        stack: Stack,
        settings: StageSettings,
        chat: Chat,
        engines: Engines,
        journal: Journal,
        training: Training,
        sink: Sink,
    ) -> None:
        algorithm = settings.algorithm
        self._stage, self._done, self._algorithm = stage, done, algorithm
        self._settings = environment_settings(settings)
        """Of each environment, by its name, and so are the next two."""
        self._limits = {e.name: Limits.of(stack, stage, e) for e in settings.environments}
        self._longest_sequence = stack.inference.max_model_length
        self._tries = {e.name: TRIES[e.failures] for e in settings.environments}
        self._chat, self._engines, self._journal = chat, engines, journal
        self._training, self._sink = training, sink
        self._mix = Mix(settings.environments, Seeds(stack.seed).branch("rl", stage.name))
        self._signals = Signals(settings)
        self._references = References(settings, chat, engines)
        self._before = journal.record_before(training.index)
        """The record of the last batch: what advantages and curriculum remember."""
        self._admission = Admission(
            batch_size=algorithm.batch_size,
            max_staleness=algorithm.max_staleness,
            step=training.step,
            batches_left=stage.steps - done,
        )
        self._next_group, self._next_prompt = journal.next_group(), journal.next_prompt(stage.name)
        self._finished: dict[int, FinishedGroup] = {}
        self._dropped: Counter[str] = Counter()
        """Rollouts dropped since the last batch, by reason."""
        self._waves = math.ceil(
            (algorithm.max_staleness + 1) * algorithm.batch_size / stack.inference.most_rollouts
        )
        """Turns that all rollouts under way take on one engine."""
        self._longest_wait = 2 * engines.update_limit + ENGINE_LIMIT + max(map(self._longest, self._limits))
        self._replaced: Counter[str] = Counter()
        """Rollouts of the groups dropped since the last batch, by reason, as planned."""
        self._failures_in_a_row = 0
        self._lost = ("", -math.inf)
        """Of what rollouts lost their engine or worker last, and when they did."""
        self._room = asyncio.Event()
        """Set when a group may have become admissible."""
        self._arrived = asyncio.Event()
        """Set when a group was finished or dropped."""

    async def run(self, after_step: AfterStep) -> None:
        """Take all steps that are left; ``after_step`` is awaited between two of them."""
        forget = self._engines.on_change(self._room.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._resume(tasks)
                admitting = tasks.create_task(self._admit(tasks))
                for stage_step in range(self._done, self._stage.steps):
                    await self._train(await self._next_batch(), stage_step)
                    await after_step()
                admitting.cancel()
        finally:
            forget()
            await self._references.close()

    def _resume(self, tasks: asyncio.TaskGroup) -> None:
        """Take up the groups that were open when the journal was cut, before any new one."""
        for group in self._journal.open_groups(self._stage.name):
            self._admission.take_up(group.plan.id, group.plan.size, group.plan.admitted)
            tasks.create_task(self._roll_out_group(group.plan, list(group.finished), group.planned))

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._room.clear()
            while self._admission.may_admit(self._engines.version.step):
                plans = self._plan()
                await self._journal.write(self._journal.plan_all, plans)
                for plan in plans:
                    tasks.create_task(self._roll_out_group(plan, [], range(plan.size)))
                    await asyncio.sleep(0)  # others have their turn between two groups
            await self._room.wait()

    def _plan(self) -> list[Plan]:
        """Admit a few groups."""
        plans = []
        while len(plans) < _PLANNED_TOGETHER and self._admission.may_admit(self._engines.version.step):
            environment = self._mix.choose(self._next_prompt, shares=self._signals.shares(self._before))
            plan = Plan(
                id=self._next_group,
                stage=self._stage.name,
                number=self._next_prompt,
                environment=environment,
                admitted=self._admission.step,
                size=self._settings[environment].group_size,
            )
            self._admission.admit(plan.id, plan.size)
            self._next_group += 1
            self._next_prompt += 1
            plans.append(plan)
        return plans

    async def _roll_out_group(self, plan: Plan, finished: list[Rollout], numbers: range | list[int]) -> None:
        """Roll out ``numbers`` of the group beside those ``finished``; then it is complete or dropped."""
        draw = self._mix.draw(plan.number, environment=plan.environment)
        results = await asyncio.gather(*(self._roll_out(plan, draw, number) for number in numbers))
        rollouts = sorted(
            [*finished, *(result for result in results if result is not None)], key=lambda r: r.number
        )
        group = FinishedGroup(plan, rollouts)
        if not self._signals.usable(group):
            await self._drop(group, "failed")
        elif self._algorithm.no_signal == "refill" and not await self._teaches(group):
            await self._drop(group, "no_signal")
        else:
            self._finished[plan.id] = group
        self._arrived.set()

    async def _teaches(self, group: FinishedGroup) -> bool:
        return await self._signals.in_time(self._signals.teaches, group)

    async def _roll_out(self, plan: Plan, draw: Draw, number: int) -> Rollout | None:
        """One rollout of the group's task; None where it failed every time."""
        own, tries = draw.seeds.branch("sample", number), self._tries[draw.name]
        for left in reversed(range(tries)):
            seeds = seeds_of_try(own, tries - 1 - left)
            what = Assignment(plan.id, number, draw.name, draw.environment, draw.task, seeds)
            try:
                rollout = await self._complete(what, draw)
            except RolloutError as error:
                log.warning("rollout %d-%d failed, %d tries left: %s", plan.id, number, left, error)
                self._count_failure(error)
                if left:
                    await asyncio.sleep(_RETRY_AFTER)
                else:
                    reason = f"failed: {error}"
                    await self._journal.write(self._journal.drop_rollout, plan.id, number, reason)
                    self._dropped["failed"] += 1
                    self._sink.event(
                        "dropped", reason="failed", environment=plan.environment, error=str(error), rollouts=1
                    )
            else:
                self._failures_in_a_row = 0
                await self._journal.write(self._journal.finish, rollout)
                self._training.progress.rollout_finished()
                return rollout
        return None

    async def _complete(self, what: Assignment, draw: Draw) -> Rollout:
        """A rollout with all that it is trained by. Raises RolloutError."""
        references = self._references
        teacher, limits = references.writes_for(what.name), self._limits[what.name]
        longest = self._longest_sequence - references.reads_more(draw)
        limits = replace(limits, sequence=min(limits.sequence, longest))
        engines = references if teacher else self._engines
        rollout = await roll_out_somewhere(what, self._chat, engines, limits, at_leisure=teacher)
        return await references.told(rollout, draw)

    async def _next_batch(self) -> list[FinishedGroup]:
        """Wait for the groups of a batch. One that is too old after all is dropped and replaced."""
        while True:
            chosen = self._admission.choose(self._finished)
            if chosen is None:
                self._arrived.clear()
                await self._wait_for_group()
                continue
            groups = [self._finished[group] for group in chosen]
            stale = [g for g in groups if self._staleness(g) > self._algorithm.max_staleness]
            if not stale:
                return groups
            for group in stale:
                del self._finished[group.plan.id]
                await self._drop(group, "stale")

    async def _wait_for_group(self) -> None:
        """Rollouts have limits of their own; this one only catches what they leave open."""
        limit = self._longest_wait
        step = self._training.step
        self._training.progress.doing(f"waiting for rollouts of stage {self._stage.name}, RL step {step}")
        try:
            async with asyncio.timeout(limit):
                await self._arrived.wait()
        except TimeoutError:
            raise OrchestratorError(
                f"stage {self._stage.name!r}: no group was finished within {limit:.0f} s "
                f"({self._engines.states()}); see the logs of the engines"
            ) from None

    async def _train(self, groups: list[FinishedGroup], stage_step: int) -> None:
        ids = [group.plan.id for group in groups]
        self._admission.seal(ids)
        for group in ids:
            del self._finished[group]
        step = self._training.step
        self._training.progress.doing(f"comparing rollouts of stage {self._stage.name}, RL step {step}")
        dropped, self._dropped = self._dropped, Counter()
        self._replaced.clear()
        lesson = await self._signals.in_time(self._signals.lesson, groups, self._before)
        record = await asyncio.to_thread(rl_record, groups, step, dropped)
        record |= lesson.record
        await self._training.take(Work(self._stage, stage_step, lesson.samples, groups, record))
        self._before = record
        self._admission.applied()
        self._room.set()

    def _longest(self, environment: str) -> float:
        """Seconds that a group may take whose rollouts all fail; they run at once as far as engines allow."""
        once = self._limits[environment].seconds + self._references.limit + _RETRY_AFTER
        return self._tries[environment] * (self._waves * once + LONGEST_WAIT)

    def _staleness(self, group: FinishedGroup) -> int:
        return self._training.step - group.oldest_step

    async def _drop(self, group: FinishedGroup, reason: str) -> None:
        """No batch will hold the group; another one takes its place."""
        plan = group.plan
        await self._journal.write(self._journal.drop_group, plan.id, reason)
        self._admission.drop(plan.id)
        self._dropped[reason] += len(group.rollouts)
        self._sink.event(
            "dropped",
            reason=reason,
            environment=plan.environment,
            group=plan.id,
            rollouts=len(group.rollouts),
            lengths=[rollout.sampled for rollout in group.rollouts],
        )
        self._replaced[reason] += plan.size
        if self._replaced.total() >= _BATCHES_REPLACED * self._algorithm.batch_size:
            most, count = self._replaced.most_common(1)[0]
            raise OrchestratorError(
                f"stage {self._stage.name!r}: groups of {self._replaced.total()} rollouts were dropped since "
                f"the last batch, {count} of them {most}: {_REMEDIES[most]}"
            )
        self._room.set()

    def _count_failure(self, error: RolloutError) -> None:
        """What many rollouts lose together is one failure: a worker that dies, or does not start."""
        if isinstance(error.__cause__, EngineLost | WorkerLost | WorkerRefused):
            lost, now = (str(error.__cause__), time.monotonic()), time.monotonic()
            before, self._lost = self._lost, lost
            if lost[0] == before[0] and now - before[1] < _ONE_CAUSE:
                return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= 2 * self._algorithm.batch_size:
            raise OrchestratorError(
                f"stage {self._stage.name!r}: {self._failures_in_a_row} rollouts failed one after the other; "
                f"the last one: {error}"
            ) from error
