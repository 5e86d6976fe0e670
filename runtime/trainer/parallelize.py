"""From a single-device model to one that is sharded over the trainer's ranks: a straight list of steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.schemas.trainer import Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(path: Path, settings: Trainer, compute_dtype: str, mesh: DeviceMesh) -> Decoder:
    """The model of a Hugging Face folder with float32 masters, sharded over ``mesh``.

    The whole model is never in one place: it is laid out without storage, sharded, then each rank reads its
    parts. Raises ModelError where the folder does not hold what its config says.
    """
    recompute = settings.activation_checkpointing == "full"
    with torch.device("meta"):
        model = Decoder(shape_of(path), head_chunk=settings.head_chunk, recompute=recompute)
    shard(model, mesh, DTYPES[compute_dtype])
    model.to_empty(device=mesh.device_type)
    folder.load(model, path)
    return model


def shard(model: Decoder, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2: each layer is gathered when it runs; gradients are summed over ranks in float32."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # temperatures stay float32; hidden states already have the layers' type
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by global counts: no mean over ranks on top
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def gathered(model: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, on the CPU, in ``dtype``, one at a time. All ranks must consume it together.

    A tensor may share memory with the parameter: copy what is kept beyond the next optimizer step.
    """
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(dtype).full_tensor().cpu()
