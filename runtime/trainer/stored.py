"""What the trainer's part of a checkpoint holds, and whether that is what is asked of it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.trainer.models.names import is_adapter

WEIGHTS, MOMENTS = "model.", "optimizer.state."
"""What the names of tensors begin with (checkpoint.state_of)."""
TYPES = {
    frozenset({"exp_avg", "exp_avg_sq", "step"}): "adamw",
    frozenset({"exp_avg", "exp_avg_sq", "step", "momentum_buffer"}): "muon",
    frozenset({"momentum_buffer"}): "sgd",
    frozenset(): "signsgd, or of sgd without momentum",
}
"""The optimizer's type, by what it keeps of parameters."""


class ChangedError(CheckpointError):
    """A checkpoint that is whole, but of other settings than those that it is to go on with."""


def metadata_of(part: Path) -> Metadata:
    """Names, shapes and places of all that is in ``part``. Raises CheckpointError where it cannot be read."""
    try:
        return FileSystemReader(part).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{part} cannot be read: {error}") from error


def compare_weights(part: Path, metadata: Metadata, expected: Mapping[str, torch.Size]) -> None:
    """Raises ChangedError where the weights in ``part`` are not those of a model with ``expected`` shapes."""
    found = {
        name.removeprefix(WEIGHTS): entry.size
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    if any(is_adapter(name) for name in found.keys() ^ expected.keys()):
        held, asked = (any(map(is_adapter, names)) for names in (found, expected))
        what = "has no adapters" if not held else "has adapters" if not asked else "has other adapters"
        raise ChangedError(
            f"{part} {what}: trainer.lora was changed since; put it back, or start a new run from an export "
            "(`stackrl export`)"
        )
    faults = [f"{name} is missing" for name in expected.keys() - found.keys()]
    faults += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    faults += [
        f"{name} is {list(found[name])}, expected {list(expected[name])}"
        for name in found.keys() & expected.keys()
        if found[name] != expected[name]
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ChangedError(
            f"the weights in {part} are not those of the run's model: {'; '.join(sorted(faults)[:5])}{more}"
        )


def compare_moments(part: Path, metadata: Metadata, expected: Mapping[str, Iterable[str]]) -> None:
    """Raises ChangedError where ``part`` does not hold what an optimizer keeps of each parameter."""
    found: dict[str, set[str]] = {}
    for name in metadata.state_dict_metadata:
        if name.startswith(MOMENTS):
            parameter, _, kind = name.removeprefix(MOMENTS).rpartition(".")
            found.setdefault(parameter, set()).add(kind)
    held, asked = (frozenset().union(*kinds.values()) for kinds in (found, expected))
    if held != asked:
        before, now = (TYPES.get(kinds, "another type") for kinds in (held, asked))
        put_back = f"`--set trainer.optimizer.type={before}`" if before.isalpha() else "trainer.optimizer"
        raise ChangedError(
            f"{part} holds the optimizer state of {before}, and the stack asks for {now}: put it back with "
            f"{put_back} (or in the stage), or change it in a later stage: each begins with a fresh optimizer"
        )
    if changed := sorted(found.keys() ^ expected.keys()):
        raise ChangedError(
            f"{part} holds the optimizer state of other parameters than are trained now, such as "
            f"{changed[0]}: put back what trainer.mixture and trainer.lora said"
        )
