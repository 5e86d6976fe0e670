"""The model in a Hugging Face folder: of one of our families, or else transformers' own."""

from __future__ import annotations

from pathlib import Path

from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import FAMILIES, config_of, shape_of
from stackrl.runtime.trainer.models.generic import Generic

Model = Decoder | Generic


def model_of(folder: Path, *, head_chunk: int = 512) -> Model:
    """On the device that modules are made on at the time, its weights not read yet.

    ``head_chunk``: tokens per chunk of the head. Raises ModelError where it cannot be trained.
    """
    if config_of(folder)["model_type"] in FAMILIES:
        return Decoder(shape_of(folder), head_chunk=head_chunk)
    return Generic(folder, head_chunk=head_chunk)
