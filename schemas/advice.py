"""What is allowed and likely to cost: `validate` warns of it, and nothing refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stackrl.schemas import skypilot
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, is_mixed
from stackrl.schemas.stack import Stack

OWNED = frozenset({"", "slurm", "ssh"})
"""Infrastructures whose machines stay, and cost the same, whether a run is on them or not; "": not said."""


def advice(stack: Stack, task: Task) -> list[Problem]:
    """Everything that a second look may be worth."""
    return [*_machines_stay(task), *_machines_go(stack, task), *_needs_a_group(stack, task)]


def _machines_stay(task: Task) -> Iterator[Problem]:
    for choice in _choices(task):
        place = _place(choice)
        if place not in OWNED and "autostop" not in choice:
            what = f"nothing says what becomes of machines of {place} when a run under `sky launch` has ended"
            mend = "say autostop: {idle_minutes: 10, down: true}; `stackrl launch` does so by itself"
            yield Problem(("resources",), what, mend, at_key=True)
            return


def _machines_go(stack: Stack, task: Task) -> Iterator[Problem]:
    if any(choice.get("use_spot") for choice in _choices(task)) and not stack.checkpoint.path:
        what = "a spot machine that is taken away takes the checkpoints along"
        mend = "say a folder of storage that stays, such as a bucket in file_mounts"
        yield Problem(at("checkpoint", "path"), what, mend)


def _needs_a_group(stack: Stack, task: Task) -> Iterator[Problem]:
    if is_mixed(stack) and not all(_place(choice) == "slurm" for choice in _choices(task)):
        what = "plain `sky launch` cannot start machines of different kinds, which are several tasks to it"
        yield Problem(at("roles"), what, "type `stackrl launch FILE --infra k8s`, or `--infra slurm`")


def _choices(task: Task) -> list[dict[str, Any]]:
    return skypilot.choices_of(task.get("resources") or {})


def _place(choice: dict[str, Any]) -> str:
    """The cloud of an alternative."""
    return skypilot.infra_of(choice).partition("/")[0].lower()
