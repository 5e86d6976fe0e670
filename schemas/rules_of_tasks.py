"""Rules over SkyPilot's own keys: what its schema lets pass and nobody means. schemas/rules.py knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from stackrl.schemas import skypilot
from stackrl.schemas.problems import Path, Problem
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]

SECRETS = ("STACKRL_TOKEN", "HF_TOKEN", "WANDB_API_KEY")
"""Variables that a run knows to be secrets, wherever they are given."""


def nodes_are_counted(stack: Stack, task: Task) -> Problems:
    if (nodes := task.get("num_nodes")) is not None and nodes < 1:
        yield Problem(("num_nodes",), f"must be at least 1, is {nodes}", "leave it out for one node")


def keys_are_spelt(stack: Stack, task: Task) -> Problems:
    """Where SkyPilot takes any key and ignores those it does not know, a key that is nearly a known one is a
    slip."""
    checked = {key: value for key, value in task.items() if not key.startswith("_")}
    yield from _nearly_known(checked, skypilot.task_schema(), ())


def secrets_are_not_written(stack: Stack, task: Task) -> Problems:
    """The file is kept with the run, copied to its machines, and as a rule committed."""
    secrets, variables = task.get("secrets") or {}, task.get("envs") or {}
    for name in secrets if isinstance(secrets, Mapping) else ():  # or a list: names alone
        if secrets[name] is not None:
            yield _secret("secrets", name, "a secret in a file is none: the file is kept with the run")
    for name in SECRETS:
        if name in variables:
            yield _secret("envs", name, "what stands under envs is shown and kept, and this is a secret")


def _secret(key: str, name: str, what: str) -> Problem:
    mend = f"say secrets: {{{name}: null}}, and give its value by `export {name}=…`"
    return Problem((key, name), what, mend, at_key=True)


def _nearly_known(value: Any, schema: Mapping[str, Any], path: Path) -> Problems:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nearly_known(item, schema.get("items", {}), (*path, index))
    for form in schema.get("anyOf", schema.get("oneOf", [schema])) if isinstance(value, Mapping) else ():
        known = form.get("properties", {})
        for key, item in value.items():
            if key in known:
                yield from _nearly_known(item, known[key], (*path, key))
            elif form.get("additionalProperties") is True:
                for near in get_close_matches(key, known, 1, 0.85):
                    yield Problem((*path, key), "there is no such key", f"did you mean {near}?", at_key=True)
