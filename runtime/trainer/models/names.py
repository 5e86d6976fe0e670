"""Between a model's parameters and the tensors of its files: names, and experts that are stacked in memory.

Files hold one tensor per matrix of each expert, named as the family's publisher did; engines and transformers
take the same. In memory all experts of a layer are two tensors (mlp.Experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from stackrl.runtime.trainer.models.shape import Names

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"
ADAPTERS = ("lora_A", "lora_B")
"""In the names of tensors that the files of a model do not hold (trainer/lora.py)."""
FLOAT32 = "e_score_correction_bias"
"""The end of the names of tensors that keep this type: rounded, they would choose other experts."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: the whole of a tensor in memory, or the part of one expert."""

    name: str
    """In the file."""
    begin: tuple[int, ...]
    """Where it begins in the tensor in memory."""
    size: tuple[int, ...]
    """Of the part, in the dimensions of the tensor in memory."""
    stacked: bool
    """Whether the first of these dimensions counts experts; the file's tensor lacks it."""

    @property
    def shape(self) -> list[int]:
        """In the file."""
        return list(self.size[self.stacked :])

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a whole tensor in memory."""
        part = tensor[tuple(slice(b, b + s) for b, s in zip(self.begin, self.size, strict=True))]
        return part[0] if self.stacked else part


def pieces(name: str, shape: Sequence[int], names: Names) -> Iterator[Piece]:
    """The tensors of the files that make up the tensor ``name`` of ``shape`` in memory, in their order."""
    gate, up, down = names.expert
    if name.endswith(GATE_UP):
        experts, rows, columns = shape
        stem, half = renamed(name.removesuffix("gate_up_proj"), names), (1, rows // 2, columns)
        for expert in range(experts):
            yield Piece(f"{stem}{expert}.{gate}.weight", (expert, 0, 0), half, True)
            yield Piece(f"{stem}{expert}.{up}.weight", (expert, rows // 2, 0), half, True)
    elif name.endswith(DOWN):
        stem = renamed(name.removesuffix("down_proj"), names)
        for expert in range(shape[0]):
            yield Piece(f"{stem}{expert}.{down}.weight", (expert, 0, 0), (1, *shape[1:]), True)
    else:
        yield Piece(renamed(name, names), (0,) * len(shape), tuple(shape), False)


def is_adapter(name: str) -> bool:
    """Whether ``name`` is that of an adapter's tensor."""
    return any(word in name for word in ADAPTERS)


def renamed(name: str, names: Names) -> str:
    """What the files call ``name``."""
    for ours, theirs in names.parts:
        name = name.replace(ours, theirs)
    return name
