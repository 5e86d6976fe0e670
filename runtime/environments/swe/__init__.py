"""Repair a repository: the model works in a sandbox with a shell, and hidden tests judge what it did."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, ClassVar

from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Policy, Task, Turn
from stackrl.runtime.environments.questions import PROPERTIES
from stackrl.runtime.environments.sandboxes import SCHEMA

MINIATURE = "miniature"


class Swe(AgentEnvironment):
    """Rewards: `resolved`, 1 where all tests of the task pass; `mended`, the share of its failing ones."""

    weights: ClassVar[Mapping[str, float]] = {"resolved": 1.0, "mended": 0.0}
    at_once: ClassVar[int | None] = 32
    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "dataset": {
                "type": "string",
                "minLength": 1,
                "description": "`miniature`: small broken repositories that are made up; swe-bench, "
                "swe-bench-lite, swe-bench-verified, swe-rebench; a file (.jsonl or .parquet), a folder or a "
                "pattern; a data set of the Hugging Face Hub, OWNER/NAME. Rows are in SWE-bench's format.",
            },
            **PROPERTIES,
            "sandbox": SCHEMA,
            "repositories": {
                "type": "string",
                "minLength": 1,
                "description": "Folder of clones, `owner/name` each, for tasks without an image.",
            },
            "image": {
                "type": "string",
                "minLength": 1,
                "description": "Image of tasks that name none; `{id}` is filled in, and `{docker_id}`, the "
                "id as SWE-bench's images have it.",
            },
            "folder": {
                "type": "string",
                "pattern": "^/",
                "description": "Where the repository stands in an image.",
            },
            "python": {
                "type": "string",
                "minLength": 1,
                "description": "Interpreter that runs the tests, in the sandbox.",
            },
            "actions": {
                "enum": ["tools", "blocks"],
                "description": "Commands are calls of tools, or blocks in the text of any model.",
            },
            "turns": {"type": "integer", "minimum": 1, "description": "Answers that the model may give."},
            "output": {
                "type": "integer",
                "minimum": 100,
                "description": "Characters of a command's output that the model is shown.",
            },
            "test_timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Seconds for the tests of a task.",
            },
        },
        "required": ["dataset"],
        "additionalProperties": False,
    }

    def __init__(self, dataset: str, **args: Any) -> None:
        # what follows is imported when it is needed: `stackrl plan` asks for the schema alone
        from stackrl.runtime.environments.swe.tasks import Tasks

        self._tasks = Tasks(dataset, **args)
        self.tools = self._tasks.tools

    def task(self, rng: Random) -> Task:
        return self._tasks.draw(rng)

    def demonstration(self, task: Task, rng: Random, noise: float) -> list[Turn]:
        return self._tasks.demonstration(task, rng, noise)

    async def start(self) -> None:
        """Try the sandbox, once. Raises SandboxError with what to do."""
        await self._tasks.start()

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Raises SandboxError and InstanceError where the machine or the task is at fault, not the model."""
        return await self._tasks.roll_out(task, policy)
