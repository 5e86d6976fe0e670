"""LoRA (arXiv 2106.09685): W + s·BA in place of W, with s = alpha / rank, of which A and B alone are trained.

Adapters are put into the plain model, before it is sharded, and are sharded with what they stand beside. The
model's own parameters keep their names: files are read as without adapters. What leaves the model, to engines
and to files, is merged first. Linear layers have A [rank, in] and B [out, rank]; of stacked experts each
matrix has its own, stacked in the same way. Gate and up of an expert are one matrix in memory and two to
adapters, as they are in files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.mlp import Experts, product
from stackrl.runtime.trainer.models.names import Piece, is_adapter, renamed
from stackrl.runtime.trainer.models.shape import ModelError, Names
from stackrl.schemas.lora import Lora

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of experts in memory, and what each holds one below the other, in `Names.expert`'s order."""
FOLDER = "adapter"
"""Beside the final model."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROUTERS = ("gate", "router")
"""What models of transformers call a router that is a linear layer."""
PREFIX = "base_model.model."
"""Before every name in PEFT's files."""


class AdaptedLinear(nn.Linear):
    """Wx + b + s·BAx."""

    adapted = ("weight",)

    def adapt(self, settings: Lora) -> None:
        """Called once, on a linear layer that has been given this class."""
        self.scale = settings.alpha / settings.rank
        options = {"bias": False, "device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, settings.rank, **options)
        self.lora_B = nn.Linear(settings.rank, self.out_features, **options)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) + self.lora_B(self.lora_A(states) * self.scale)

    def factors(self, name: str, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """A and B of what is added to the parameter ``name``; ``read`` gives this module's parameters."""
        return read("lora_A.weight"), read("lora_B.weight")


class AdaptedExperts(Experts):
    """Experts, some of whose matrices have adapters: `up_proj_lora_A` [E, rank, in], `_B` [E, out, rank]."""

    def adapt(self, part: str, settings: Lora) -> None:
        """Called for each part to adapt, on experts that have been given this class."""
        self.scale = settings.alpha / settings.rank
        (name,) = (name for name, parts in PARTS.items() if part in parts)
        matrices = getattr(self, name)
        experts, rows, columns = matrices.shape
        self.register_parameter(
            f"{part}_lora_A", nn.Parameter(matrices.new_empty(experts, settings.rank, columns))
        )
        self.register_parameter(
            f"{part}_lora_B",
            nn.Parameter(matrices.new_empty(experts, rows // len(PARTS[name]), settings.rank)),
        )

    @property
    def adapted(self) -> tuple[str, ...]:
        """The parameters that something is added to."""
        return tuple(name for name, parts in PARTS.items() if any(map(self._has, parts)))

    def through(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        result = super().through(name, rows, counts)
        if name not in self.adapted:
            return result
        lora_A, lora_B = self.factors(name, lambda own: _here(getattr(self, own)))
        return result + product(product(rows, lora_A, counts) * self.scale, lora_B, counts)

    def factors(self, name: str, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """As AdaptedLinear.factors: [E, r, in] and [E, out, r], where r counts the ranks of all parts.

        So one product serves parts that lie one below the other, with
        [B1; 0]·A1 + [0; B2]·A2 = [B1, 0; 0, B2]·[A1; A2].
        """
        parts = PARTS[name]
        narrow, wide = [], []
        for above, part in enumerate(parts):
            if self._has(part):
                narrow.append(read(f"{part}_lora_A"))
                rows = read(f"{part}_lora_B")
                below = len(parts) - 1 - above
                wide.append(F.pad(rows, (0, 0, above * rows.shape[1], below * rows.shape[1])))
        return torch.cat(narrow, dim=1), torch.cat(wide, dim=2)

    def _has(self, part: str) -> bool:
        return hasattr(self, f"{part}_lora_A")


def add_adapters(model: Decoder, settings: Lora) -> None:
    """Freeze ``model`` and put adapters beside its linear layers, which `initialize` then fills.

    Router, embedding, head and what is frozen anyway (the indexer of sparse attention) have none. Raises
    ModelError where a target is no linear layer of the model.
    """
    found = list(_linear_layers(model))
    names = dict.fromkeys(name for name, _ in found)
    targets = names if settings.targets is None else settings.targets
    for target in targets:
        if target not in names:
            raise ModelError(
                f"trainer.lora.targets: the model has no linear layer {target!r}; it has {', '.join(names)}"
            )
    model.requires_grad_(False)
    for name, module in found:
        if name not in targets:
            continue
        # in place, as FSDP does it too: whoever holds the module goes on holding it
        if isinstance(module, Experts):
            module.__class__ = AdaptedExperts
            module.adapt(name, settings)
        else:
            module.__class__ = AdaptedLinear
            module.adapt(settings)


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """A uniform in ±1/√in and B zero, as PEFT does, so that the model is what it was without adapters.

    Drawn from ``seed`` and the name of each matrix: the same on any number of ranks.
    """
    for name, tensor in model.state_dict().items():
        if not is_adapter(name):
            continue
        tensor.zero_()
        if "lora_A" in name:
            for piece in _pieces(name, tensor.shape, model.names):
                folder.fill(tensor, piece, lambda piece: _drawn(piece, seed))


def merged(model: Decoder, read: Callable[[str], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model has without adapters, with what they add to it, sharded as it is.

    ``read`` gives the tensors of ``model`` by name where they are not its own. All ranks must consume it
    together.
    """
    tensors = model.state_dict()  # first of all: it brings gathered parameters back into shards
    read = read or tensors.__getitem__
    adapted = {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, AdaptedLinear | AdaptedExperts)
        for name in module.adapted
    }
    for name in tensors:
        if is_adapter(name):
            continue
        tensor = read(name).detach()
        if name in adapted:
            path, _, parameter = name.rpartition(".")
            factors = adapted[name].factors(parameter, lambda own, path=path: _whole(read(f"{path}.{own}")))
            tensor = _sum(tensor, *factors, adapted[name].scale)
        yield name, tensor


@contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    """Within, adapters add nothing."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear | AdaptedExperts)]
    scales = [module.scale for module in adapted]
    try:
        for module in adapted:
            module.scale = 0.0
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.scale = scale


def adapters(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The adapters, whole, on the CPU, under PEFT's names. All ranks must consume it together."""
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            whole = _whole(tensor.detach()).cpu()
            for piece in _pieces(name, whole.shape, model.names):
                yield PREFIX + piece.name, piece.of(whole)


def save(tensors: Iterable[tuple[str, Tensor]], settings: Lora, base: Path, target: Path) -> None:
    """Write what `adapters` gives to ``target`` as PEFT does, for the model at ``base``."""
    content = {name: tensor.contiguous() for name, tensor in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in content}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with folder.replacing(target) as new:
        save_file(content, new / WEIGHTS, metadata={"format": "pt"})
        (new / CONFIG).write_text(json.dumps(config, indent=2))


def _linear_layers(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What can have adapters, by the last part of its name; experts once for each of their matrices."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if getattr(module, "weight", None) is model.head_weight:
            continue
        if isinstance(module, Experts):
            yield from ((part, module) for parts in PARTS.values() for part in parts)
        elif isinstance(module, nn.Linear) and module.weight.requires_grad and name not in ROUTERS:
            yield name, module


def _pieces(name: str, shape: Sequence[int], names: Names) -> Iterator[Piece]:
    """As names.pieces, for a tensor of an adapter."""
    if len(shape) == 2:
        yield Piece(renamed(name, names), (0, 0), tuple(shape), False)
        return
    stem, _, own = name.rpartition(".")
    part, _, letter = own.rpartition("_lora_")
    theirs = names.expert[[part for parts in PARTS.values() for part in parts].index(part)]
    for expert in range(shape[0]):
        in_file = renamed(f"{stem}.{expert}.{theirs}.lora_{letter}.weight", names)
        yield Piece(in_file, (expert, 0, 0), (1, *shape[1:]), True)


def _drawn(piece: Piece, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {piece.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return nn.init.kaiming_uniform_(torch.empty(piece.shape), a=math.sqrt(5), generator=generator)


def _sum(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """``weight`` + ``scale`` · BA, sharded as ``weight`` is, whose part alone of BA is computed."""
    local, offset = folder.held(weight)
    *experts, rows, columns = (slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
    change = lora_B[*experts, rows] @ lora_A[*experts, :, columns]
    total = torch.add(local, change, alpha=scale)
    if not isinstance(weight, DTensor):
        return total
    return DTensor.from_local(
        total,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
