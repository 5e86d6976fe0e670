"""What an orchestrator does first: roll back with a new trainer, or go on where one was killed under its own.

Killed in the middle of a step it left a batch that is sealed: the trainer has stepped on it, has it in hand
or knows nothing of it. It may have left a step that metrics.jsonl lacks, and checkpoints that are cut and not
complete.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.monitor.records import Reader
from stackrl.runtime.monitor.rollouts import RolloutLog
from stackrl.runtime.orchestrator import journal as books
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.journal import Journal, SealedBatch
from stackrl.runtime.orchestrator.recipes import recipes
from stackrl.runtime.orchestrator.saving import Saving
from stackrl.runtime.orchestrator.signals import Signals
from stackrl.runtime.orchestrator.supervised import source_of
from stackrl.runtime.orchestrator.training import Training, Work
from stackrl.runtime.run import RunFolder
from stackrl.schemas.stack import Stack, settings_of


class Start:
    """How the orchestrator begins. ``checkpoint`` is where its trainer begins; None: at the very first step.

    ``restarted``: under a trainer that is at work.
    """

    def __init__(self, run: RunFolder, stack: Stack) -> None:
        self.incarnation = run.state().incarnation
        self.checkpoint: Path | None = run.restore()
        self.restarted = books.is_of(run.journal, self.incarnation)
        self._run, self._stack = run, stack

    @property
    def index(self) -> int:
        """The optimizer step at which this incarnation began."""
        return checkpoints.index_of(self.checkpoint) if self.checkpoint else 0

    def open_journal(self, sink: Sink, rollouts: RolloutLog) -> Journal:
        """The run's journal, rolled back with the trainer.

        What others show of the steps beyond is taken back first: were this process killed in between, the
        next one would find the journal of another incarnation, and do it all again.
        """
        if self.restarted:
            sink.event("orchestrator_resumed", incarnation=self.incarnation)
        else:
            self._take_back(sink, rollouts)
        snapshot = self.checkpoint / checkpoints.BOOKS / "journal.sqlite" if self.checkpoint else None
        journal = Journal(self._run.journal, self.incarnation, snapshot, recipes(self._stack))
        for stage, rollouts_dropped in journal.changed.items():
            why = "what they were made from has changed"
            sink.event("open_groups_dropped", stage=stage, rollouts=rollouts_dropped, reason=why)
        return journal

    def _take_back(self, sink: Sink, rollouts: RolloutLog) -> None:
        damaged = checkpoints.set_aside(self._run.checkpoints(self._stack), self.index)
        rollouts.forget_from(self.index)
        if self.checkpoint is not None or self.incarnation > 1:
            facts = {"from": str(self.checkpoint or ""), "index": self.index}
            sink.event("resumed", **facts, damaged=[str(path) for path in damaged])


async def take_up(
    run: RunFolder, stack: Stack, chat: Chat, journal: Journal, training: Training, saving: Saving
) -> None:
    """Settle what an orchestrator that was killed left half done."""
    last = journal.batch(training.index - 1)
    if last is not None and training.index > _recorded(run):
        await training.write_down_again(await _work(last, stack, chat, run, journal), last.step)
    saving.take_up(training.index, training.is_saved(training.index))
    if (sealed := journal.sealed()) is not None:
        await training.settle(await _work(sealed, stack, chat, run, journal))


def _recorded(run: RunFolder) -> int:
    """Optimizer steps that metrics.jsonl tells of."""
    reader = Reader(run)
    reader.read()
    return reader.history.done


async def _work(batch: SealedBatch, stack: Stack, chat: Chat, run: RunFolder, journal: Journal) -> Work:
    """The work of a batch as it was when it was sealed."""
    stage = next(stage for stage in stack.stages if stage.name == batch.stage)
    if stage.type == "supervised":
        return replace(source_of(stage, stack, chat, run).work(batch.stage_step), record=batch.record)
    signals, before = Signals(settings_of(stack, stage)), journal.record_before(batch.index)
    lesson = await signals.in_time(signals.lesson, batch.groups, before)
    return Work(stage, batch.stage_step, lesson.samples, batch.groups, batch.record)
