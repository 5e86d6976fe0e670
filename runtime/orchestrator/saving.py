"""Checkpoints, seen from the orchestrator: cut, wait for the trainer's part, declare complete."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.orchestrator.journal import Journal
from stackrl.runtime.orchestrator.recorder import Recorder
from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.batches import BatchServer
from stackrl.schemas.stack import Stack

SAVE_LIMIT = 7200.0
"""Seconds that the trainer's part of a checkpoint may take."""


class Saving:
    """The checkpoints of one incarnation. ``newest`` is the index of the last cut."""

    def __init__(
        self,
        run: RunFolder,
        stack: Stack,
        server: BatchServer,
        journal: Journal,
        recorder: Recorder,
        tasks: asyncio.TaskGroup,
        newest: int,
        ranks: int,
    ) -> None:
        """``ranks``: of the trainer, which writes the other part."""
        self.newest = newest
        self._run, self._server, self._journal, self._recorder = run, server, journal, recorder
        self._folder, self._settings = run.checkpoints(stack), stack.checkpoint
        self._incarnation, self._ranks = run.state().incarnation, ranks
        self._tasks = tasks
        self._open: set[asyncio.Task[None]] = set()
        self._completing = asyncio.Lock()

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is cut and not complete."""
        return bool(self._open)

    async def trainer_saved(self) -> None:
        """Wait until the trainer's part of the newest cut is on disk. Raises TransportError."""
        await self._server.durable(self.newest - 1, SAVE_LIMIT)

    def cut(self, index: int) -> None:
        """The books of this very moment belong to the checkpoint of ``index``; the trainer's part follows.

        Raises OrchestratorError where the disk refuses.
        """
        checkpoint = checkpoints.folder(self._folder, index)
        part = checkpoint / checkpoints.BOOKS
        new = checkpoint / f".{checkpoints.BOOKS}"
        try:
            for left_over in (new, part):
                shutil.rmtree(left_over, ignore_errors=True)
            self._journal.snapshot(new / "journal.sqlite")
            for file in (self._run.metrics, self._run.events, self._run.path / "stack.json"):
                shutil.copy(file, new)
            new.rename(part)
        except OSError as error:
            raise OrchestratorError(
                f"the checkpoint {checkpoint} could not be cut: {error}; `df {self._folder}` shows how full "
                "its disk is"
            ) from error
        self._follow(index)

    def take_up(self, index: int, due: bool) -> None:
        """Finish what an orchestrator that was killed at step ``index`` left unfinished.

        ``due``: whether a checkpoint of that step was to be made.
        """
        cuts = sorted(
            checkpoints.index_of(part.parent)
            for part in self._folder.glob(f"step-*[0-9]/{checkpoints.BOOKS}")
        )
        for earlier in (cut for cut in cuts if cut <= index):
            if (checkpoints.folder(self._folder, earlier) / checkpoints.MANIFEST).exists():
                self._journal.make_durable(earlier - 1)
                self.newest = max(self.newest, earlier)
                self._recorder.progress.saved(self.newest)
            else:
                self._follow(earlier)
        if due and index > self.newest:
            self.cut(index)

    async def finish(self) -> None:
        """Wait until all that were cut are complete."""
        if self._open:
            self._recorder.progress.doing(f"waiting for the checkpoint of step {self.newest}")
            await asyncio.gather(*self._open)

    def _follow(self, index: int) -> None:
        self.newest = max(self.newest, index)
        task = self._tasks.create_task(self._complete(index))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _complete(self, index: int) -> None:
        """Declare the checkpoint that resumes at ``index`` complete once the trainer's part is on disk.

        One at a time and in order: hashing may take longer than the way to the next checkpoint.
        """
        async with self._completing:
            await self._server.durable(index - 1, SAVE_LIMIT)
            checkpoint = checkpoints.folder(self._folder, index)
            await asyncio.to_thread(self._declare, checkpoint, index)
            await self._journal.write(self._journal.make_durable, index - 1)
            keep, keep_every = self._settings.keep, self._settings.keep_every
            await asyncio.to_thread(checkpoints.prune, self._folder, keep, keep_every)
            self._recorder.progress.saved(index)
            self._recorder.event("checkpoint", index=index, path=str(checkpoint))

    def _declare(self, checkpoint: Path, index: int) -> None:
        facts = {
            "index": index,
            "incarnation": self._incarnation,
            "ranks": self._ranks,
            "used": self._run.state().used,
        }
        try:
            checkpoints.write_manifest(checkpoint, facts)
        except OSError as error:
            raise OrchestratorError(f"the checkpoint {checkpoint} could not be completed: {error}") from error
