"""`stackrl eval`: a stack's environments, put to a model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stackrl.runtime.run import RunError, find_run
from stackrl.schemas.environments import Evaluate
from stackrl.schemas.loader import load
from stackrl.schemas.stack import Stack

TELL_EVERY = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Question:
    """What the command line asks for. ``prompts`` and ``samples`` None: as the stack says."""

    endpoint: str
    model: str
    secret: str | None
    prompts: int | None
    samples: int | None
    requests: int
    greedy: bool


def evaluate(what: str, changes: Sequence[str], question: Question, output: str) -> int:
    """Print the scores as a table or as JSON. ``what``: a stack file, or a run whose stack it is.

    Where all answers of an environment failed, the scores of the others are printed all the same.
    """
    from stackrl.runtime.environments import EnvironmentRefused
    from stackrl.runtime.orchestrator.endpoint import Endpoint, EndpointError
    from stackrl.runtime.orchestrator.endpoint_evaluation import (
        EvaluationFailed,
        Plan,
        environments_of,
        evaluate_endpoint,
    )

    stack = _stack(what, changes)
    if not environments_of(stack):
        raise RunError(f"{what} has no environments to evaluate; name some under `evaluate: environments:`")
    said = stack.evaluate or Evaluate()
    samples = 1 if question.greedy else question.samples or said.samples
    plan = Plan(question.prompts or said.prompts, samples, question.requests, question.greedy)

    async def ask() -> dict[str, dict[str, float]]:
        async with Endpoint(question.endpoint, question.model, _key(question.secret)) as endpoint:
            await endpoint.check()
            return await evaluate_endpoint(stack, endpoint, plan, _Told())

    failure: EvaluationFailed | None = None
    try:
        found = asyncio.run(ask())
    except EvaluationFailed as error:
        found, failure = error.found, error
    except (EndpointError, EnvironmentRefused) as error:
        print(f"stackrl: {error}", file=sys.stderr)
        return 1
    if found:
        _print(found, question, output)
    if failure is not None:
        print(f"stackrl: {failure}", file=sys.stderr)
    return 1 if failure is not None else 0


def _print(found: Mapping[str, Mapping[str, float]], question: Question, output: str) -> None:
    about = {"endpoint": question.endpoint, "model": question.model, "greedy": question.greedy}
    print(json.dumps(about | {"environments": found}, indent=1) if output == "json" else table(found))


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """For people: a line for each environment, means with their 95 % intervals."""
    rows = [_row(name, scores) for name, scores in found.items()]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _row(name: str, scores: Mapping[str, float]) -> dict[str, str]:
    many = f" avg@{scores['samples']:.0f}" if scores["samples"] > 1 else ""
    passes = {key: _share(scores, key) for key in scores if key.startswith("pass@") and "_" not in key}
    return {
        "environment": name,
        "prompts": f"{scores['prompts']:.0f}",
        f"reward{many}": f"{scores['reward']:.3f} [{scores['reward_low']:.3f}, {scores['reward_high']:.3f}]",
        f"solved{many}": _share(scores, "exact"),
        **passes,
        "failed": f"{scores['failed']:.0f}",
        "tokens": f"{scores['tokens']:.0f}",
    }


def _share(scores: Mapping[str, float], key: str) -> str:
    mean, low, high = (100 * scores[name] for name in (key, f"{key}_low", f"{key}_high"))
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]"


class _Told:
    """Progress on standard error, a line now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TELL_EVERY

    def __call__(self, name: str, done: int, of: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TELL_EVERY
            print(f"  {name}: {done} of {of} answers", file=sys.stderr)


def _stack(what: str, changes: Sequence[str]) -> Stack:
    if Path(what).is_file() or what.endswith((".yaml", ".yml")):
        return load(what, changes).stack
    if changes:
        raise RunError("--set changes a stack file, and a run is named; name the file instead")
    return find_run(what).stack()


def _key(secret: str | None) -> str | None:
    if secret is None:
        return None
    if not (key := os.environ.get(secret)):
        raise RunError(f"--secret {secret}: there is no such variable; say `export {secret}=…` first")
    return key
