"""How much memory each role of a run takes, from the stack alone: nothing is started or asked.

Of the trainer one rank's share, of the engines one GPU's, phase by phase. Where what is counted comes from,
and how near it is to what was measured: docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stackrl.runtime.launch.planning import engine_memory, trainer_memory
from stackrl.runtime.launch.planning.accelerators import GIB, accelerator_of
from stackrl.runtime.launch.planning.engine_memory import EngineSettings
from stackrl.runtime.launch.planning.trainer_memory import SIZES, Settings
from stackrl.runtime.trainer.models.shape import Shape
from stackrl.schemas import split
from stackrl.schemas.base import size_in_bytes
from stackrl.schemas.comparison import trainer_keeps_reference
from stackrl.schemas.degrees import degrees_of
from stackrl.schemas.pools import inference_of, role_of
from stackrl.schemas.shapes import shape_of
from stackrl.schemas.split import Task
from stackrl.schemas.stack import Stack, settings_of

CONTEXT = GIB
"""What a process takes of a GPU before it has a tensor: the driver's context, kernels, buffers of NCCL."""
HEADROOM = 0.05
"""Share of a shared GPU's rest that the trainer leaves free (trainer/shared_gpu.py)."""
ALLOCATOR = "allocator"
"""The part that torch's allocator holds besides what is asked of it: that grows and shrinks with the room."""
KEPT_VERSIONS = 2
"""Versions of the weights that rank 0 keeps for engines (transport/weights.py)."""


@dataclass(frozen=True)
class Phase:
    """A moment of a role's work at which it may take most."""

    name: str
    """`head`, `backward`, `optimizer step`, `publish` of the trainer; `serve`, `update` of engines."""
    parts: Mapping[str, int]
    """What is held, in bytes, by its name: parameters, gradients, optimizer, gathered, activations, …"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """Without what could be given up where room is short."""
        return self.total - self.parts.get(ALLOCATOR, 0)


@dataclass(frozen=True)
class Cache:
    """Keys and values of an engine, over all of its GPUs."""

    bytes_per_token: int
    tokens: int
    """That it holds at most."""
    requests: int
    """Of `inference.max_model_length` that it holds at once, `inference.max_requests` at most."""


@dataclass(frozen=True)
class RoleMemory:
    """What a role takes of one GPU; without GPUs, what one of its processes takes."""

    role: str
    """The key under `roles:`."""
    accelerator: str | None
    """Kind of GPU; None on a CPU."""
    capacity: int | None
    """Bytes of one GPU that the role may take. None where that is not known."""
    phases: tuple[Phase, ...]
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes beside it in the memory of the machine, by part; of the trainer's first rank, which has most."""
    cache: Cache | None = None
    """Engines alone."""

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def lacking(self) -> int:
        """Bytes by which the role does not fit; 0 where it does, or where that is not known."""
        if self.capacity is None:
            return 0
        return max(max(phase.needed for phase in self.phases) - self.capacity, 0)


def memory_of(stack: Stack, task: Task, accelerator: str | None = None) -> list[RoleMemory]:
    """Each role's, in the order of `roles:`; empty where nothing says what the model is made of.

    ``accelerator``: the kind of GPU of roles without `resources` of their own, of those that the task allows;
    by default the first.
    """
    known = shape_of(stack.model)
    if known is None:
        return []
    found = []
    for name, role in split.roles_of(stack):
        kinds = split.kinds_of_role(stack, task, name) if split.device_of(stack, task) == "cuda" else []
        first = kinds[0][0] if kinds else None
        kind = first if role.resources and role.resources.get("accelerators") else accelerator or first
        if name == "trainer":
            if ranks := split.trainer_ranks(stack, task):
                found.append(trainer_role(stack, known.shape, ranks, kind if kinds else None))
        else:
            found.append(engine_role(stack, known.shape, name, kind if kinds else None))
    return found


def trainer_role(stack: Stack, shape: Shape, ranks: int, kind: str | None) -> RoleMemory:
    """One of ``ranks`` ranks on a GPU of ``kind``; None: on a CPU."""
    settings = settings_for(stack, ranks, "cpu" if kind is None else "cuda")
    phases = trainer_memory.trainer_phases(shape, settings)
    if kind is not None:
        phases = {name: _with_allocator(parts) for name, parts in phases.items()}
    return RoleMemory(
        "trainer",
        kind,
        _room_of_trainer(stack, kind),
        tuple(Phase(name, _there(parts)) for name, parts in phases.items()),
        _there(_host(stack, shape, settings)),
    )


def settings_for(stack: Stack, ranks: int, device: str) -> Settings:
    """What the memory of each of ``ranks`` ranks of the trainer depends on."""
    optimizers = [settings_of(stack, stage).optimizer for stage in stack.stages]
    second = stack.trainer.lora is None and trainer_keeps_reference(stack)
    degrees = degrees_of(stack, ranks)
    return Settings(stack.trainer, degrees, device, stack.model.dtype, optimizers, reference=second)


def engine_role(stack: Stack, shape: Shape, name: str, kind: str | None) -> RoleMemory:
    """An engine of the pool ``name`` on GPUs of ``kind``; None: on a CPU."""
    inference = inference_of(stack, name)
    batched = engine_memory.batched_tokens(inference, _memory_of_gpu(kind))
    copies = role_of(stack, name).data_parallel
    settings = EngineSettings(inference, SIZES[stack.model.dtype], batched, copies)
    working = engine_memory.working_bytes(shape, settings)
    arriving = engine_memory.arriving_bytes(shape, settings)
    fixed = {"weights": engine_memory.weight_bytes(shape, settings)}
    if kind is not None and inference.compile:
        fixed["graphs"] = engine_memory.GRAPHS
    per_token = engine_memory.cache_bytes_per_token(shape, settings)
    one_request = -(-per_token * inference.max_model_length // settings.gpus)
    if kind is None:  # the cache is said, the rest is taken
        room = capacity = size_in_bytes(inference.cache_memory) + sum(fixed.values()) + max(working, arriving)
    else:
        room, capacity = _room_of_engine(stack, name, kind)
    known = capacity is not None
    cache = room - sum(fixed.values()) - (working if kind else max(working, arriving)) if known else 0
    # an engine does not start where a request of full length finds no room
    held = {**fixed, "cache": max(cache, one_request)}
    free = capacity - room if known else 0
    tokens = max(cache, 0) * settings.gpus // per_token
    return RoleMemory(
        name,
        kind,
        capacity,
        (
            Phase("serve", _there({**held, "working": working, "left free": free})),
            # nothing is computed meanwhile
            Phase("update", _there({**held, "arriving layer": arriving})),
        ),
        cache=Cache(per_token, tokens, min(tokens // inference.max_model_length, inference.max_requests)),
    )


def _room_of_engine(stack: Stack, name: str, kind: str) -> tuple[int, int | None]:
    """Bytes of a GPU that an engine fills, and those that it may take while new weights arrive."""
    memory, role = _memory_of_gpu(kind), getattr(stack.roles, name)
    if memory is None:
        return 0, None
    if role.share and role.engine_memory:
        room = size_in_bytes(role.engine_memory) - CONTEXT
        return room, room + int(HEADROOM * max(memory - room - 2 * CONTEXT, 0))
    return int(memory * stack.inference.gpu_memory) - CONTEXT, memory - CONTEXT


def _memory_of_gpu(kind: str | None) -> int | None:
    known = accelerator_of(kind) if kind else None
    return known.memory if known else None


def _room_of_trainer(stack: Stack, kind: str | None) -> int | None:
    """Bytes of a GPU that are left for the trainer's tensors."""
    memory = _memory_of_gpu(kind)
    if memory is None:
        return None
    sharing = next((role for _, role in split.roles_of(stack) if getattr(role, "share", None)), None)
    if sharing is None or sharing.engine_memory is None:
        return memory - CONTEXT
    left = memory - size_in_bytes(sharing.engine_memory) - CONTEXT
    return int(left * (1 - HEADROOM))


def _with_allocator(parts: Mapping[str, int]) -> dict[str, int]:
    return {**parts, ALLOCATOR: int(trainer_memory.ALLOCATOR_SHARE * sum(parts.values()))}


def _host(stack: Stack, shape: Shape, settings: Settings) -> dict[str, int]:
    """Of rank 0 in the memory of its machine."""
    parts = trainer_memory.host_parts(shape, settings)
    keeps = stack.weights.transport in ("pull", "collective") or stack.weights.content == "delta"
    if split.has_engines(stack) and keeps:
        parts["versions for engines"] = KEPT_VERSIONS * trainer_memory.published_bytes(shape, settings)
    return parts


def _there(parts: Mapping[str, int]) -> dict[str, int]:
    """Without what is not there."""
    return {name: size for name, size in parts.items() if size > 0}
