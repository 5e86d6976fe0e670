"""From a checkpoint to a Hugging Face folder, in one process on the CPU, one tensor at a time.

Any number of ranks may have written the checkpoint, in any layout: its metadata says where the parts of a
tensor lie, and no process group is needed to put them together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.ledger import PART
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.model import model_of
from stackrl.runtime.trainer.models.names import FLOAT32, pieces
from stackrl.runtime.trainer.stored import WEIGHTS, compare_weights, metadata_of
from stackrl.schemas.lora import Lora


def export(checkpoint: Path, source: Path, target: Path, dtype: str, adapters: Lora | None) -> None:
    """Write the weights of ``checkpoint`` in ``dtype`` to ``target``, with config, tokenizer and templates of
    ``source``, the model that the run began with. Whole or not at all; a folder at ``target`` is replaced.

    ``adapters``: those that were trained beside the weights; they are merged in. Raises ModelError where
    ``source`` is no model, CheckpointError where the checkpoint does not hold the weights of such a model,
    OSError where the disk refuses.
    """
    tensors = _tensors(checkpoint / PART, source, getattr(torch, dtype), adapters)
    try:
        folder.export(tensors, source, target, dtype)
    except SafetensorError as error:
        raise OSError(f"{target} cannot be written: {error}") from error


def _tensors(
    part: Path, source: Path, dtype: torch.dtype, adapters: Lora | None
) -> Iterator[tuple[str, Tensor]]:
    """What the files of the model hold, in their order; one tensor of the model is in memory at a time."""
    with torch.device("meta"):
        model = model_of(source)
        if adapters:
            lora.add_adapters(model, adapters)
    reader = _Reader(part)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    compare_weights(part, reader.metadata, shapes)
    for name, tensor in lora.merged(model, reader.read):
        kept = tensor.dtype if name.endswith(FLOAT32) else dtype
        for piece in pieces(name, tensor.shape, model.names):
            # a view of stacked experts would hold all of them while the next are read
            yield piece.name, piece.of(tensor).to(kept, copy=piece.stacked)


class _Reader(dcp.FileSystemReader):
    """Tensors of the model, one by one. The metadata, which grows with tensors × ranks, is read once."""

    def __init__(self, part: Path) -> None:
        super().__init__(part)
        self._part, self.metadata = part, metadata_of(part)

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self.metadata

    def read(self, name: str) -> Tensor:
        """The whole tensor ``name`` in the type that it is stored in."""
        entry = self.metadata.state_dict_metadata[WEIGHTS + name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are no other ranks is as it should be
                dcp.load({WEIGHTS + name: tensor}, storage_reader=self, no_dist=True)
        except dcp.api.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"{name} cannot be read from {self._part}: {cause}") from error
        return tensor
