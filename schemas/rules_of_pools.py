"""Rules over pools of engines: their degrees and arguments, and two that work together.

schemas/rules.py registers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from stackrl.schemas.degrees import experts_of
from stackrl.schemas.engine_arguments import names, refusal
from stackrl.schemas.pools import POOLS, inference_of
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]


def engine_arguments(stack: Stack) -> Problems:
    """Arguments are vLLM's own, and cannot undo what is decided elsewhere."""
    yield from _arguments(at("inference", "arguments"), stack.inference.arguments)
    for pool, role in _pools(stack):
        yield from _arguments(at("roles", pool, "arguments"), role.arguments)


def pairs_agree(stack: Stack) -> Problems:
    """A prompt's keys are cut over the GPUs of both engines."""
    if not (stack.roles.prefill and stack.roles.decode):
        return
    widths = [inference_of(stack, pool).tensor_parallel for pool in ("prefill", "decode")]
    if max(widths) % min(widths):
        what = f"prefill engines divide keys over {widths[0]} GPUs, decode engines over {widths[1]}"
        mend = "choose degrees of which one divides the other"
        yield Problem(at("roles", "decode"), what, mend)
    for pool in ("prefill", "decode"):
        if getattr(stack.roles, pool).share:
            what = "two pools do not fit on the trainer's GPU"
            yield Problem(at("roles", pool, "share"), what, "use one pool, roles.inference")


def experts_are_there(stack: Stack) -> Problems:
    """Only a mixture has experts to deal."""
    from stackrl.schemas.shapes import shape_of

    if experts_of(stack) or shape_of(stack.model, cached=False) is None:
        return
    for pool, role in _pools(stack):
        if role.expert_parallel:
            what = "the model has no experts"
            yield Problem(at("roles", pool, "expert_parallel"), what, "remove it")


def _pools(stack: Stack) -> Iterator[tuple[str, object]]:
    return ((pool, role) for pool in POOLS if (role := getattr(stack.roles, pool)) is not None)


def _arguments(path: Path, arguments: dict[str, object]) -> Problems:
    for name in arguments:
        if why := refusal(name):
            yield Problem((*path, name), why, "remove it here", at_key=True)
            continue
        plain = name.replace("_", "-").partition(".")[0].removeprefix("no-")
        if plain not in names():
            near = get_close_matches(plain, names(), 1)
            mend = f"did you mean {near[0]}?" if near else "`vllm serve --help=all` names all"
            yield Problem((*path, name), "vLLM's server has no such argument", mend, at_key=True)
