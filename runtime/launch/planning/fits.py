"""What would make a role fit that does not: changes of the stack that were tried against the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stackrl.runtime.launch.planning.accelerators import ACCELERATORS, GIB, accelerator_of
from stackrl.runtime.launch.planning.memory import ALLOCATOR, RoleMemory, engine_role, trainer_role
from stackrl.runtime.trainer.models.shape import Shape
from stackrl.schemas.lora import Lora
from stackrl.schemas.pools import role_of
from stackrl.schemas.shapes import heads_divide
from stackrl.schemas.stack import Stack

Change = tuple[str, Callable[[Stack], Stack]]
"""What to write, and the stack with it."""
MOST_TOLD = 3
"""Ways out that are named."""
_FACTORS = (2, 4, 8, 16, 32, 64)


def told(role: RoleMemory) -> str:
    """By how much ``role`` does not fit, and what takes most."""
    phase = max(role.phases, key=lambda phase: phase.needed)
    needed = [(name, size) for name, size in phase.parts.items() if name != ALLOCATOR]
    largest = sorted(needed, key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {gib(size)}" for name, size in largest)
    where = f"of a {role.accelerator}" if role.accelerator else "of the process"
    return (
        f"does not fit: it needs {gib(phase.needed)} GiB {where} and may take {gib(role.capacity or 0)}, so "
        f"{gib(role.lacking)} are missing (GiB at {phase.name}: {parts})"
    )


def gib(size: int) -> str:
    """For people: GiB with as many digits as say something."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.3f}"


def trainer_mend(stack: Stack, shape: Shape, ranks: int, role: RoleMemory) -> str:
    """What helps the trainer on ``ranks`` ranks, in words; several changes together where none does alone."""

    def fits(changed: Stack, count: int = ranks, kind: str | None = role.accelerator) -> bool:
        return not trainer_role(changed, shape, count, kind).lacking

    changes = list(_trainer_changes(stack, shape, ranks))
    ways = _alone(stack, changes, fits) or _together(stack, changes, fits)
    count = next((ranks * factor for factor in _FACTORS if fits(stack, ranks * factor)), None)
    if count and not _shares(stack):
        ways.insert(2, f"{count} GPUs for the trainer instead of {ranks}")
    ways = ways[:MOST_TOLD]
    if larger := _larger(role.accelerator, lambda kind: fits(stack, kind=kind)):
        ways.append(f"GPUs as large as the {larger}")
    return _words(ways, "choose a smaller model")


def engine_mend(stack: Stack, shape: Shape, gpus: int, role: RoleMemory) -> str:
    """What helps a pool of engines that has ``gpus`` GPUs, in words."""

    def fits(changed: Stack, kind: str | None = role.accelerator) -> bool:
        return not engine_role(changed, shape, role.role, kind).lacking

    changes = list(_engine_changes(stack, gpus, role))
    ways = (_alone(stack, changes, fits) or _together(stack, changes, fits))[:MOST_TOLD]
    if larger := _larger(role.accelerator, lambda kind: fits(stack, kind)):
        ways.append(f"GPUs as large as the {larger}")
    return _words(ways, "choose a smaller model")


def _trainer_changes(stack: Stack, shape: Shape, ranks: int) -> Iterator[Change]:
    """What saves memory, the cheapest first."""
    trainer = stack.trainer
    if trainer.activation_checkpointing != "full":
        yield _trainer("activation_checkpointing: full", activation_checkpointing="full")
    if not trainer.reshard_after_forward:
        yield _trainer("reshard_after_forward: true", reshard_after_forward=True)
    if stack.device != "cpu" and not trainer.activation_offloading:
        yield _trainer("activation_offloading: true", activation_offloading=True)
    said = trainer.parallel.context or 1
    for context in (said * factor for factor in _FACTORS):
        if ranks % context == 0 and heads_divide(shape, context):
            parallel = trainer.parallel.model_copy(update={"context": context})
            yield _trainer(f"parallel.context: {context}", parallel=parallel)
    if stack.device != "cpu" and not trainer.optimizer_offload:
        yield _trainer("optimizer_offload: true", optimizer_offload=True)
    if trainer.lora is None:
        yield _trainer("lora: {}", lora=Lora())


def _trainer(text: str, **values: object) -> Change:
    return f"trainer.{text}", lambda stack: stack.model_copy(
        update={"trainer": stack.trainer.model_copy(update=values)}
    )


def _engine_changes(stack: Stack, gpus: int, role: RoleMemory) -> Iterator[Change]:
    inference = stack.inference
    own = role_of(stack, role.role)
    degrees = () if own.tensor_parallel or own.data_parallel > 1 else _FACTORS
    for width in (inference.tensor_parallel * factor for factor in degrees):
        if width <= gpus and gpus % width == 0:
            yield _inference(tensor_parallel=width)
    if role.accelerator and inference.quantization is None:
        yield _inference(quantization="fp8")
    if role.accelerator is None:
        size = role.cache.bytes_per_token * inference.max_model_length if role.cache else 0
        yield _inference(cache_memory=f"{-(-size // GIB)}GiB")
    elif not _shares(stack) and inference.gpu_memory < 0.95:
        yield _inference(gpu_memory=0.95)
    yield from (
        _inference(max_model_length=inference.max_model_length // factor)
        for factor in (2, 4, 8)
        if inference.max_model_length // factor >= 1024
    )


def _inference(**values: object) -> Change:
    ((key, value),) = values.items()
    return f"inference.{key}: {value}", lambda stack: stack.model_copy(
        update={"inference": stack.inference.model_copy(update=values)}
    )


def _alone(stack: Stack, changes: list[Change], fits: Callable[[Stack], bool]) -> list[str]:
    """Changes that suffice; of a key, the first one that does."""
    found: dict[str, str] = {}
    for text, change in changes:
        key = text.partition(":")[0]
        if key not in found and fits(change(stack)):
            found[key] = text
    return list(found.values())


def _together(stack: Stack, changes: list[Change], fits: Callable[[Stack], bool]) -> list[str]:
    """One way: changes added one to the other until it fits; of a key, the last one counts."""
    added: dict[str, str] = {}
    for text, change in changes:
        if text.startswith("trainer.lora"):
            continue
        stack = change(stack)
        added[text.partition(":")[0]] = text
        if fits(stack):
            return [" with ".join(added.values())]
    return []


def _larger(kind: str | None, fits: Callable[[str], bool]) -> str | None:
    """The GPU with the least memory of those that are larger than ``kind`` and large enough."""
    now = accelerator_of(kind) if kind else None
    if now is None:
        return None
    larger = sorted((one.memory, one.name) for one in ACCELERATORS if one.memory > now.memory)
    return next((name for _, name in larger if fits(name)), None)


def _shares(stack: Stack) -> bool:
    return stack.roles.inference is not None and stack.roles.inference.share is not None


def _words(ways: list[str], otherwise: str) -> str:
    return f"what helps: {'; or '.join(ways)}" if ways else otherwise
