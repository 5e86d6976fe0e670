"""Rules over how a run is watched, saved and ended. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as File

from stackrl.schemas import skypilot
from stackrl.schemas.guards import VARIABLE
from stackrl.schemas.problems import Problem, at
from stackrl.schemas.split import Task, nodes_of_role
from stackrl.schemas.stack import Stack, longest_rollout

Problems = Iterator[Problem]


def idle_is_longer_than_work(stack: Stack) -> Problems:
    """A rollout that takes its time must not look like a run in which nothing happens."""
    longest = longest_rollout(stack)
    idle = stack.limits.idle_minutes
    if idle * 60 <= longest:
        what = f"a rollout may take {longest:g} s, and a run that is idle for {idle:g} minutes is ended"
        mend = f"make it {longest // 60 + 1:g} or more, or lower sampling.timeout"
        yield Problem(at("limits", "idle_minutes"), what, mend)


def growth_can_count(stack: Stack) -> Problems:
    mismatch = stack.guards.mismatch
    if mismatch.growth_above >= mismatch.above:
        what = f"above {mismatch.above:g}, where growth would count, every mismatch counts already"
        yield Problem(at("guards", "mismatch", "growth_above"), what, "make it less than `above`")


def kept_ones_are_made(stack: Stack) -> Problems:
    """A checkpoint that is to stay for good has to be one that is made."""
    every, for_good = stack.checkpoint.every, stack.checkpoint.keep_every
    if for_good and for_good % every:
        what = f"checkpoints are made every {every} steps, of which few are at a multiple of {for_good}"
        multiples = {max(for_good // every, 1) * every, (for_good // every + 1) * every}
        mend = f"make it {' or '.join(map(str, sorted(multiples)))}"
        yield Problem(at("checkpoint", "keep_every"), what, mend)


def shared_checkpoints(stack: Stack, task: Task) -> Problems:
    """Each node would take a relative path for a folder of its own."""
    path = stack.checkpoint.path
    if path and skypilot.nodes(task) > 1 and not File(path).expanduser().is_absolute():
        what = f"{path} is a folder of its own on each of {skypilot.nodes(task)} nodes"
        yield Problem(
            at("checkpoint", "path"), what, "write an absolute path, at which all nodes see the same storage"
        )
    if not path and (nodes := nodes_of_role(stack, task, "trainer")) > 1:
        what = f"each of the trainer's {nodes} nodes would keep its part of a checkpoint for itself"
        mend = "say path: /…, a folder at which all nodes see the same storage"
        yield Problem(at("checkpoint", "path"), what, mend)
    if stack.weights.transport == "folder" and not stack.weights.path and skypilot.nodes(task) > 1:
        what = "each node would look for new weights in a folder of its own"
        mend = "say path: /…, a folder at which all nodes see the same storage, or use transport: pull"
        yield Problem(at("weights", "path"), what, mend)


def secrets_are_brought(stack: Stack, task: Task) -> Problems:
    """A variable that holds the webhook's URL is in `secrets` or `envs`: nothing else reaches a node."""
    webhook = stack.guards.notify.webhook or ""
    if not (match := VARIABLE.fullmatch(webhook)):
        return
    name = match[1]
    if name not in (task.get("secrets") or {}) and name not in (task.get("envs") or {}):
        what = f"nothing brings the environment variable {name} to the nodes"
        yield Problem(at("guards", "notify", "webhook"), what, f"add secrets: {{{name}: null}}")
