"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stackrl.runtime.launch.planning.plan import ENGINE, Plan, Process
from stackrl.runtime.launch.planning.work import work_of
from stackrl.runtime.trainer.models.families import FAMILIES, ModelError, config_of
from stackrl.schemas.model import PretrainedModel, RandomModel
from stackrl.schemas.shapes import KnownShape, shape_of
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import Stage

_SINGLE_ROWS = 12
"""Up to so many processes have a row each; more are gathered by role and pool."""


def table(plan: Plan, stack: Stack) -> str:
    """Processes, then how the work is divided."""
    rows = [("PROCESS", "NODE", "CORES" if plan.device == "cpu" else "GPUS", "PORTS", "COMMAND")]
    rows += [_row(group) for group in _gathered(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    return "\n".join([_title(plan), "", *lines, "", *_divisions(plan, stack)])


def _title(plan: Plan) -> str:
    nodes = f"{plan.nodes} node{'s' * (plan.nodes > 1)}"
    machine = f"{plan.gpus_per_node} × {plan.accelerator} each" if plan.gpus_per_node else "no GPUs"
    return f"{plan.name}: {nodes}, {machine}, {len(plan.processes)} processes on {plan.device}"


def _gathered(plan: Plan) -> list[list[Process]]:
    """Engines first, as they are started."""
    ordered = sorted(plan.processes, key=lambda process: process.role != ENGINE)
    if len(ordered) <= _SINGLE_ROWS:
        return [[process] for process in ordered]
    groups: dict[tuple[str, str], list[Process]] = {}
    for process in ordered:
        groups.setdefault((process.role, process.pool), []).append(process)
    return list(groups.values())


def _row(group: list[Process]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    name = first.name if first is last else f"{first.name} … {last.index}"
    if first.role == ENGINE and first.pool != "inference":
        name += f" ({first.pool})"
    computing = sorted({unit for process in group for unit in (*process.cores, *process.gpus)})
    command = " ".join(["python", *first.command])
    return (
        name,
        _span(sorted({process.node for process in group})),
        _span(computing) or "any",
        ", ".join(dict.fromkeys(port for process in group for port in process.ports)) or "-",
        command if first is last else command.replace(f"--engine {first.index}", "--engine I"),
    )


def _span(numbers: Sequence[int]) -> str:
    """``0-3`` for neighbours, else ``0,2``."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _divisions(plan: Plan, stack: Stack) -> list[str]:
    parallel = plan.parallel
    engines = sum(process.role == ENGINE for process in plan.processes)
    trainer = (
        f"{_count(parallel.ranks, 'rank')} = {parallel.replicate} replicate × {parallel.shard} shard × "
        f"{parallel.context} context; experts over {parallel.expert}"
    )
    widths = sorted({len(process.gpus) for process in plan.processes if process.role == ENGINE})
    gpus = f" of {' or '.join(_count(width, 'GPU') for width in widths)}" if plan.device == "cuda" else ""
    shares = f", {stack.roles.inference.engine_memory} of the trainer's GPU" if _shares(stack) else ""
    lines = [f"model     {_model(stack)}", f"trainer   {trainer}"]
    lines.append(f"engines   {engines}{gpus}{shares}" if engines else "engines   none: nothing is sampled")
    lines += [f"stage     {stage.name}: {stage.type}, {_work(stack, stage)}" for stage in stack.stages]
    lines.append("ports     numbers are chosen at launch; every socket asks for the run's token")
    return lines


def _model(stack: Stack) -> str:
    """Which model, and whose code trains it, as far as that can be known without fetching it."""
    model, known = stack.model, shape_of(stack.model)
    size = f" ({_weights(known)})" if known else ""
    if isinstance(model, RandomModel):
        return f"{model.architecture}{size}, made at random; the trainer's own family"
    if not isinstance(model, PretrainedModel):
        return f"{model.file} of {model.package}{size}"
    folder = Path(model.id).expanduser()
    try:
        family = known.family if known else config_of(folder)["model_type"] if folder.is_dir() else None
    except ModelError as error:
        return f"{model.id}; {error}"
    if family is None:
        return f"{model.id}; its config says which family it is, and is read when it is there"
    if family in FAMILIES:
        return f"{model.id}, {family}{size}; the trainer's own family"
    return (
        f"{model.id}, {family}{size}; through the code of transformers, sharded and replicated only "
        "(context and expert must be 1)"
    )


def _weights(known: KnownShape) -> str:
    """``743.9B weights, 40.8B for a token``."""
    work = work_of(known.shape)
    active = f", {_short(work.common + work.chosen * work.experts)} for a token" if work.experts else ""
    return f"{_short(work.weights)} weights{active}"


def _short(number: float) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _work(stack: Stack, stage: Stage) -> str:
    """How many steps of what."""
    settings = settings_of(stack, stage)
    names = ", ".join(environment.name for environment in settings.environments)
    if stage.type == "rl":
        algorithm = settings.algorithm
        prompts = algorithm.batch_size // algorithm.group_size
        size = f"{prompts} prompts × {algorithm.group_size} rollouts, staleness ≤ {algorithm.max_staleness}"
    elif stage.data is None:
        size = f"{stage.batch_size} demonstrations"
    else:
        path = stage.data.path
        size, names = f"{stage.batch_size} rows", path if isinstance(path, str) else ", ".join(path)
    if stage.steps is None:
        return f"{_count(stage.epochs or 1, 'epoch')} in steps of {size}, from {names}"
    return f"{_count(stage.steps, 'step')} of {size}, from {names}"


def _shares(stack: Stack) -> bool:
    return stack.roles.inference is not None and stack.roles.inference.share is not None


def _count(number: float, word: str) -> str:
    return f"{number:g} {word}{'s' * (number != 1)}"
