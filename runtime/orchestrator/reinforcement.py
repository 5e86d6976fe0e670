"""An RL stage: groups are admitted, rolled out, sealed into batches and trained, all at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.orchestrator.admission import Admission
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import ENGINE_LIMIT, Engines
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.groups import FinishedGroup, Plan, Rollout, training_samples
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.report import rl_record
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out_somewhere
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.orchestrator.training import Training, Work
from stackrl.schemas.stack import Stack, StageSettings
from stackrl.schemas.stages import RlStage

TRIES = 2
"""A rollout that fails is done once more before its group goes on without it."""
_RETRY_AFTER = 1.0
_BATCHES_REPLACED = 10
"""Groups, in batches, that may be dropped and replaced in one step before the run gives up."""
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
        limits: Limits,
        chat: Chat,
        engines: Engines,
        journal: Journal,
        training: Training,
        sink: Sink,
    ) -> None:
        algorithm = settings.algorithm
        self._stage, self._done, self._algorithm, self._limits = stage, done, algorithm, limits
        self._chat, self._engines, self._journal = chat, engines, journal
        self._training, self._sink = training, sink
        self._mix = Mix(settings.environments, Seeds(stack.seed).branch("rl", stage.name))
        self._admission = Admission(
            per_batch=algorithm.batch_size // algorithm.group_size,
            max_staleness=algorithm.max_staleness,
            step=training.step,
            batches_left=stage.steps - done,
        )
        self._next_group, self._next_prompt = journal.next_group(), journal.next_prompt(stage.name)
        self._finished: dict[int, FinishedGroup] = {}
        self._dropped: Counter[str] = Counter()
        """Rollouts dropped since the last batch, by reason."""
        self._longest_wait = (
            TRIES * algorithm.group_size * (limits.seconds + _RETRY_AFTER)
            + 2 * engines.update_limit
            + ENGINE_LIMIT
        )
        self._replaced: Counter[str] = Counter()
        """Groups dropped since the last batch, by reason."""
        self._failures_in_a_row = 0
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

    def _resume(self, tasks: asyncio.TaskGroup) -> None:
        """Take up the groups that were open when the journal was cut, before any new one."""
        for group in self._journal.open_groups(self._stage.name):
            self._admission.take_up(group.plan.id, group.plan.admitted)
            tasks.create_task(self._roll_out_group(group.plan, list(group.finished), group.planned))

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._room.clear()
            while self._admission.may_admit(self._engines.version.step):
                plan = self._plan()
                self._journal.plan(plan)
                self._admission.admit(plan.id)
                tasks.create_task(self._roll_out_group(plan, [], range(plan.size)))
            await self._room.wait()

    def _plan(self) -> Plan:
        plan = Plan(
            id=self._next_group,
            stage=self._stage.name,
            number=self._next_prompt,
            environment=self._mix.draw(self._next_prompt).name,
            admitted=self._admission.step,
            size=self._algorithm.group_size,
        )
        self._next_group += 1
        self._next_prompt += 1
        return plan

    async def _roll_out_group(self, plan: Plan, finished: list[Rollout], numbers: range | list[int]) -> None:
        """Roll out ``numbers`` of the group beside those ``finished``; then it is complete or dropped."""
        results = await asyncio.gather(*(self._roll_out(plan, number) for number in numbers))
        rollouts = sorted(
            [*finished, *(result for result in results if result is not None)], key=lambda r: r.number
        )
        group = FinishedGroup(plan, rollouts)
        if not group.usable:
            self._drop(group, "failed")
        elif self._algorithm.no_signal == "refill" and not group.has_signal:
            self._drop(group, "no_signal")
        else:
            self._finished[plan.id] = group
        self._arrived.set()

    async def _roll_out(self, plan: Plan, number: int) -> Rollout | None:
        """One rollout; None where it failed every time."""
        draw = self._mix.draw(plan.number)
        seeds = draw.seeds.branch("sample", number)
        what = Assignment(plan.id, number, draw.name, draw.environment, draw.task, seeds)
        for left in reversed(range(TRIES)):
            try:
                rollout = await roll_out_somewhere(what, self._chat, self._engines, self._limits)
            except RolloutError as error:
                log.warning("rollout %d-%d failed, %d tries left: %s", plan.id, number, left, error)
                self._count_failure(error)
                if left:
                    await asyncio.sleep(_RETRY_AFTER)
                else:
                    self._journal.drop_rollout(plan.id, number, f"failed: {error}")
                    self._dropped["failed"] += 1
                    self._sink.event(
                        "dropped", reason="failed", environment=plan.environment, error=str(error), rollouts=1
                    )
            else:
                self._failures_in_a_row = 0
                self._journal.finish(rollout)
                self._training.progress.rollout_finished()
                return rollout
        return None

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
                self._drop(group, "stale")

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
        samples = training_samples(groups, self._algorithm.advantage)
        record = rl_record(groups, self._training.step, self._dropped)
        self._dropped.clear()
        self._replaced.clear()
        await self._training.take(Work(self._stage, stage_step, samples, groups, record))
        self._admission.applied()
        self._room.set()

    def _staleness(self, group: FinishedGroup) -> int:
        return self._training.step - group.oldest_step

    def _drop(self, group: FinishedGroup, reason: str) -> None:
        """No batch will hold the group; another one takes its place."""
        plan = group.plan
        self._journal.drop_group(plan.id, reason)
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
        self._replaced[reason] += 1
        if self._replaced.total() >= _BATCHES_REPLACED * self._admission.per_batch:
            most, count = self._replaced.most_common(1)[0]
            raise OrchestratorError(
                f"stage {self._stage.name!r}: {self._replaced.total()} groups were dropped since the last "
                f"batch, {count} of them {most}: {_REMEDIES[most]}"
            )
        self._room.set()

    def _count_failure(self, error: RolloutError) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= 2 * self._algorithm.batch_size:
            raise OrchestratorError(
                f"stage {self._stage.name!r}: {self._failures_in_a_row} rollouts failed one after the other; "
                f"the last one: {error}"
            ) from error
