"""The rollouts of Swe: a task drawn, worked on in one sandbox, graded in another."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from stackrl.runtime.environments.base import Outcome, Policy, Task, Tool, Turn, user
from stackrl.runtime.environments.sandboxes import machine
from stackrl.runtime.environments.sandboxes.base import SandboxError
from stackrl.runtime.environments.swe import MINIATURE
from stackrl.runtime.environments.swe.agent import BLOCKS_TEXT, TOOLS, TOOLS_TEXT, Rules, work
from stackrl.runtime.environments.swe.datasets import KNOWN, instances
from stackrl.runtime.environments.swe.demonstrations import demonstration
from stackrl.runtime.environments.swe.grading import Place, grade
from stackrl.runtime.environments.swe.instances import Instance
from stackrl.runtime.environments.swe.miniatures import miniature
from stackrl.runtime.environments.swe.workspace import Workspace

GRADING_SECONDS = 60.0
"""Of a rollout, for its grading beside the time of the tests: two sandboxes, and git."""
TEXT = (
    "The current folder is a repository with a problem:\n\n{problem}\n\nMend it; leave the tests alone. {how}"
)


class Tasks:
    """The tasks of a data set and where they are worked on."""

    def __init__(
        self,
        dataset: str,
        subset: str = "default",
        split: str = "",
        limit: int | None = None,
        sandbox: Mapping[str, Any] | None = None,
        repositories: str = "",
        image: str = "",
        folder: str = "",
        python: str = "",
        actions: str = "tools",
        turns: int = 30,
        output: int = 8000,
        test_timeout: float = 300.0,
    ) -> None:
        """As the stack's `args`. Raises ValueError and DataError."""
        known = None if repositories else KNOWN.get(dataset)
        sandbox = sandbox or {"type": "bubblewrap"}
        self._place = Place(
            machine=machine(sandbox),
            repositories=Path(repositories).expanduser() if repositories else None,
            image=image or (known.image if known else ""),
            folder=folder or (known.folder if known else Place.folder),
            python=python or (known.python if known else Place.python),
            test_timeout=test_timeout,
        )
        self._rules = Rules(
            turns=turns,
            output=output,
            blocks=actions == "blocks",
            path=posixpath.dirname(self._place.python),
        )
        self.tools: Sequence[Tool] = () if self._rules.blocks else TOOLS
        self._instances: Sequence[Instance] = ()
        if dataset != MINIATURE:
            self._instances = instances(dataset, subset, split, limit)
            _check(self._instances, self._place, in_containers=sandbox["type"] == "docker")
        self._checking: asyncio.Task[None] | None = None

    def draw(self, rng: Random) -> Task:
        instance = rng.choice(self._instances) if self._instances else miniature(rng)
        how = BLOCKS_TEXT if self._rules.blocks else TOOLS_TEXT
        text = TEXT.format(problem=instance.problem_statement.strip(), how=how)
        return Task(messages=(user(text),), data=instance)

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return demonstration(task.data, rng, noise, blocks=self._rules.blocks)

    async def start(self) -> None:
        if self._checking is None:
            self._checking = asyncio.ensure_future(self._place.machine.check())
        await asyncio.shield(self._checking)

    async def roll_out(self, task: Task, policy: Policy) -> Outcome:
        until = self._end_of_work(policy.seconds)
        await self.start()
        instance, place = task.data, self._place
        async with place.machine.sandbox(place.image_of(instance)) as sandbox:
            workspace = Workspace(sandbox, instance, place.folder, place.repositories)
            await workspace.prepare()
            if until is not None and until <= asyncio.get_running_loop().time():
                raise SandboxError("no time was left when the repository stood in its sandbox")
            done = await work(policy, sandbox, workspace.folder, self._rules, until)
            patch = await workspace.diff()
        found = await grade(instance, patch, place)
        return Outcome(
            {"resolved": float(found.resolved), "mended": found.mended},
            metrics={
                "solved": float(found.resolved),
                "kept": found.kept,
                "changed_lines": float(_changed_lines(patch)),
                **done.metrics(),
            },
        )

    def _end_of_work(self, seconds: float | None) -> float | None:
        """When the model has to be done, by the loop's clock, in a rollout of ``seconds`` that begins now: it
        must be graded in time also where it hangs the tests."""
        if seconds is None:
            return None
        return asyncio.get_running_loop().time() + seconds - self._place.test_timeout - GRADING_SECONDS


def _check(tasks: Sequence[Instance], place: Place, *, in_containers: bool) -> None:
    """Whether every task's repository can be had in a sandbox of this kind."""
    for task in tasks:
        if task.files or place.repositories is not None:
            continue
        if not in_containers:
            raise ValueError(
                f"{task.instance_id} stands in an image: write sandbox: {{type: docker}}, or name a folder "
                "of clones as `repositories`"
            )
        if not place.image_of(task):
            raise ValueError(f"{task.instance_id} names no image; write one as `image`")


def _changed_lines(patch: str) -> int:
    """Lines that a diff adds or takes away."""
    lines = patch.splitlines()
    return sum(line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")) for line in lines)
