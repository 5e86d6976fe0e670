"""What is done before anything is trained: environments are made once, rows are looked at and tokenised."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stackrl.runtime.data.files import DataError, find, fingerprint, read
from stackrl.runtime.data.store import Halted, Store, make_store
from stackrl.runtime.data.tokens import Tokenizing
from stackrl.runtime.environments import make
from stackrl.runtime.environments.base import Environment
from stackrl.runtime.environments.workers import InWorkers
from stackrl.runtime.monitor.records import Tail
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.datasets import Dataset, parts, store_folder
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.run import RunFolder
from stackrl.schemas.data import Data
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage, Stage, SupervisedStage


@dataclass
class Reading:
    """The files of a run's stages, on their way into its stores.

    ``begun``: steps taken of each stage. ``goes_on`` hears of which stage how many rows are done; where it
    says no, what is left is left.
    """

    run: RunFolder
    stack: Stack
    chat: Chat
    begun: dict[str, int]
    goes_on: Callable[[str, int], bool]

    def read(self) -> list[dict[str, Any]]:
        """Make the stores that are missing of stages which are not over; what was made.

        Raises DataError where a row cannot be learnt from, where there are too few, or where the files of a
        stage that has begun are not what they were, and EnvironmentRefused.
        """
        made: list[dict[str, Any]] = []
        stages = [stage for stage in self.stack.stages if self.begun.get(stage.name) != stage.steps]
        self._make_environments(stages)
        for stage in stages:
            if not isinstance(stage, SupervisedStage) or stage.data is None:
                continue
            for part, data in parts(stage):
                folder = store_folder(self.run, self.stack, stage, part, data)
                if Store.is_whole(folder):
                    continue
                try:
                    self._make(stage, data, folder)
                except Halted:
                    return made
                facts = asdict(Store(folder).facts)
                made.append({"stage": stage.name, "part": part, "store": folder.name, **facts})
            Dataset(stage, self.stack, self.run)
        return made

    def _make_environments(self, stages: Sequence[Stage]) -> None:
        """What is wrong with one is told now, not when its stage begins; data sets are fetched meanwhile, and
        sandboxes and judges tried."""
        shown = [s for s in stages if isinstance(s, SupervisedStage) and s.data is None]
        for environment in itertools.chain(*(settings_of(self.stack, s).environments for s in shown)):
            make(environment)
        rolled_out = [settings_of(self.stack, s).environments for s in stages if isinstance(s, RlStage)]
        if self.stack.evaluate is not None:
            rolled_out.append(self.stack.evaluate.environments)
        tried = set()
        for environment in itertools.chain(*rolled_out):
            made = make(environment)
            if (same := str([environment.type, environment.args])) not in tried:
                tried.add(same)
                asyncio.run(_try(made, environment.name))

    def _make(self, stage: SupervisedStage, data: Data, folder: Path) -> None:
        files = find(data.path)
        mark = fingerprint(files)
        if self.begun.get(stage.name):
            self._refuse_changed(folder.name, mark, stage.name)
        tokenizing = Tokenizing(self.chat, data, self.stack.trainer.sequence_length)
        rows = read(files, data.limit)
        try:
            make_store(folder, rows, tokenizing, mark, lambda number: self.goes_on(stage.name, number))
        except OSError as error:
            raise OrchestratorError(
                f"the rows of stage {stage.name} cannot be stored in {folder}: {error}; see `df {folder}`"
            ) from error

    def _refuse_changed(self, store: str, mark: str, stage: str) -> None:
        """A run that goes on without its folder reads the files again; they must hold what they held."""
        for event in Tail(self.run.events).read():
            if event["event"] == "data_ready" and event["store"] == store and event["fingerprint"] != mark:
                raise DataError(
                    f"the files of stage {stage}, which has begun, hold something else than when it began; "
                    "put back what they were, or start a new run"
                )


async def _try(environment: Environment, name: str) -> None:
    """What rollouts need, once, where the environment can tell. Raises OrchestratorError: another machine,
    or the same one later, may have it."""
    try:
        await (environment.try_start() if isinstance(environment, InWorkers) else environment.start())
    except Exception as error:
        raise OrchestratorError(f"environment {name!r} cannot be used: {error}") from error
