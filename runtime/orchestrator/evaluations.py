"""When a run is evaluated: before and after each RL stage, and on held-out environments between its steps.

Held-out environments are evaluated first of all on the weights that the run begins with.
Each evaluation is made once, as far as events.jsonl tells: none that is in there is made again, unless its
weights were rolled back, and one that a killed process owed is made when the run goes on. One that fails
is told in there, as `evaluation_failed`, and the run learns on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stackrl.runtime.inference.answers import FIRST_VERSION
from stackrl.runtime.monitor.metrics import Sink
from stackrl.runtime.monitor.records import Tail
from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.orchestrator.engines import ENGINE_LIMIT, Engines
from stackrl.runtime.orchestrator.evaluation import EvaluationFailed, evaluate
from stackrl.runtime.orchestrator.rollout import Limits
from stackrl.runtime.orchestrator.training import Training
from stackrl.runtime.run import RunFolder
from stackrl.schemas.environments import Environment, Evaluate
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage, Stage

log = logging.getLogger(__name__)
Moment = tuple[str, str, int]
"""Stage, when (`before`, `after`, `held-out NAME`), and the optimizer steps behind the weights."""


class Evaluations:
    """Those of one life of the orchestrator; it makes the ones that are due and not in the books."""

    def __init__(
        self, run: RunFolder, stack: Stack, chat: Chat, engines: Engines, training: Training, sink: Sink
    ) -> None:
        self._stack, self._chat, self._engines = stack, chat, engines
        self._training, self._sink = training, sink
        self._plan = stack.evaluate or Evaluate()
        self._made = evaluations_made(run)

    async def first(self, stage: Stage) -> None:
        """Before anything is trained, where ``stage`` comes first and is supervised."""
        if not self._plan.environments or self._training.index:
            return
        await self._engines.holding(FIRST_VERSION, ENGINE_LIMIT)
        if self._engines.version == FIRST_VERSION:  # else they have learnt in a life that was rolled back
            await self._held_out(stage)

    async def before(self, stage: RlStage) -> None:
        """Before the first step of ``stage``."""
        await newest_weights(self._engines, self._training)
        await self._held_out(stage)
        await self._evaluate(stage, settings_of(self._stack, stage).environments, "before")

    async def between(self, stage: RlStage) -> None:
        """After a step of ``stage``, where held-out environments are due then."""
        if self._plan.every is not None and self._training.step % self._plan.every == 0:
            await newest_weights(self._engines, self._training)
            await self._held_out(stage)

    async def after(self, stage: RlStage) -> None:
        """After the last step of ``stage``."""
        await newest_weights(self._engines, self._training)
        await self._held_out(stage)
        await self._evaluate(stage, settings_of(self._stack, stage).environments, "after")

    async def _held_out(self, stage: Stage) -> None:
        for environment in self._plan.environments:
            await self._evaluate(stage, [environment], f"held-out {environment.name}")

    async def _evaluate(self, stage: Stage, environments: Sequence[Environment], when: str) -> None:
        moment = (stage.name, when, self._training.index)
        if moment in self._made:
            return
        try:
            result = await evaluate(
                environments,
                self._stack.seed,
                self._chat,
                self._engines,
                {e.name: Limits.of(self._stack, stage, e) for e in environments},
                self._training.progress,
                prompts=self._plan.prompts,
                samples=self._plan.samples,
            )
            name = "evaluated"
        except EvaluationFailed as error:
            log.warning("the evaluation %s of stage %s failed: %s", when, stage.name, error)
            name, result = "evaluation_failed", {"error": str(error)}
        place = {"version": str(self._engines.version), "index": self._training.index}
        self._sink.event(name, stage=stage.name, when=when, **place, **result)
        self._made.add(moment)
        self._training.restart_clock()


def evaluations_made(run: RunFolder) -> set[Moment]:
    """What events.jsonl tells of weights that the run still has or has gone on from."""
    made: set[Moment] = set()
    for event in Tail(run.events).read():
        if event["event"] == "evaluated":
            made.add((event["stage"], event["when"], event["index"]))
        elif event["event"] == "resumed":
            made = {moment for moment in made if moment[2] <= event["index"]}
    return made


async def newest_weights(engines: Engines, training: Training) -> None:
    """Wait until the engines hold them."""
    await engines.holding(training.version, ENGINE_LIMIT + engines.update_limit)
