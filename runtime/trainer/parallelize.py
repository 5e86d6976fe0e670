"""From a single-device model to one that is sharded over the trainer's ranks: a straight list of steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.trainer.models.mlp import Mixture
from stackrl.runtime.trainer.models.names import FLOAT32, pieces
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
    """FSDP2: each layer, and apart from it its experts, is gathered when it runs; gradients are summed over
    ranks in float32."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # temperatures stay float32; hidden states already have the layers' type
    )
    for layer in model.model.layers:
        if isinstance(layer.mlp, Mixture):
            fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=precision)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by global counts: no mean over ranks on top
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def gathered(model: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model's files, whole, on the CPU, in ``dtype``, layer by layer under the names that
    transformers and the engines read. What must not be rounded keeps its type. All ranks must consume it
    together.

    A tensor may share memory with the parameter: copy what is kept beyond the next optimizer step.
    """
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach() if name.endswith(FLOAT32) else tensor.detach().to(dtype)
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        for piece in pieces(name, whole.shape, model.names):
            yield piece.name, piece.of(whole)
