"""From a single-device model to one that is sharded over the trainer's ranks: a straight list of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stackrl.runtime.trainer import lora
from stackrl.runtime.trainer.activations import keep_less
from stackrl.runtime.trainer.compilation import compile_layers
from stackrl.runtime.trainer.context_parallel import share_context
from stackrl.runtime.trainer.expert_parallel import cut_beside, share_experts
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.emulation import emulated, widen_products
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.trainer.models.generic import Generic
from stackrl.runtime.trainer.models.mlp import Mixture
from stackrl.runtime.trainer.models.model import Model, model_of
from stackrl.runtime.trainer.models.names import FLOAT32, pieces
from stackrl.runtime.trainer.routing import prepare_routers
from stackrl.schemas.trainer import Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(path: Path, settings: Trainer, compute_dtype: str, meshes: Meshes, seed: int = 0) -> Model:
    """The model of a Hugging Face folder with float32 masters, divided over ``meshes``.

    The whole model is never in one place: it is laid out without storage, sharded, then each rank reads its
    parts. Adapters are drawn from ``seed``. Raises ModelError where the folder does not hold what its config
    says.
    """
    with torch.device("meta"):
        model = model_of(path, head_chunk=settings.head_chunk)
    if isinstance(model, Generic):
        model.refuse(meshes.degrees)
    prepare_routers(model, settings.mixture)
    if settings.lora:
        lora.add_adapters(model, settings.lora)  # first: later steps hold on to the forward of modules
    if meshes.context.ranks > 1:
        share_context(model, shape_of(path), meshes.context)
    if meshes.expert is not None:
        share_experts(model, meshes.expert)
    if emulated(meshes.device, DTYPES[compute_dtype]):
        widen_products(model)
    if settings.compile:
        compile_layers(model, meshes.device)
    keep_less(model, settings.activation_checkpointing, offloading=settings.activation_offloading)
    on_host, let_go = settings.optimizer_offload, settings.reshard_after_forward
    shard(model, meshes, DTYPES[compute_dtype], let_go=let_go, on_host=on_host)
    model.to_empty(device="cpu" if on_host else meshes.device)
    if on_host:
        _bring_buffers(model, meshes.device)
    folder.load(model, path)
    lora.initialize(model, seed)
    if isinstance(model, Generic):
        model.check(DTYPES[compute_dtype], meshes.device)
    return model


def shard(model: Model, meshes: Meshes, compute_dtype: torch.dtype, *, let_go: bool, on_host: bool) -> None:
    """FSDP2: each layer, and apart from it its experts, is gathered when it runs; gradients are summed over
    ranks in float32. ``let_go``: of what was gathered, until the backward pass; ``on_host``: shards, their
    gradients, and with them the optimizer's steps, are in host memory.

    On a single rank that computes in float32 the model stays as it is: there is nothing to gather or to cast,
    and FSDP would copy every weight twice a step.
    """
    if meshes.dense.size() == 1 and compute_dtype == torch.float32 and not on_host:
        return
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # temperatures stay float32; hidden states already have the layers' type
    )
    options = {"mp_policy": precision, "reshard_after_forward": let_go}
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=meshes.device == "cuda")
    for layer in model.layers:
        if isinstance(getattr(layer, "mlp", None), Mixture):
            fully_shard(
                layer.mlp.experts,
                mesh=meshes.beside,
                **options,
                shard_placement_fn=meshes.expert and partial(cut_beside, ranks=meshes.beside.size(-1)),
            )
        fully_shard(layer, mesh=meshes.dense, **options)
    fully_shard(model, mesh=meshes.dense, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by global counts: no mean over ranks on top
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def computes_on(model: Model) -> torch.device:
    """The device of this rank's layers, which is not where its shards are when these are in host memory."""
    parameter = next(model.parameters())
    return (
        torch.device(parameter.device_mesh.device_type)
        if isinstance(parameter, DTensor)
        else parameter.device
    )


def _bring_buffers(model: Model, device: str) -> None:
    """To ``device``: they are not sharded, and layers use them where they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def gathered(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model's files, whole, on the CPU, in ``dtype``, layer by layer under the names that
    transformers and the engines read, adapters merged in. What must not be rounded keeps its type. All ranks
    must consume it together.

    A tensor may share memory with the parameter: copy what is kept beyond the next optimizer step.
    """
    for name, tensor in lora.merged(model):
        tensor = tensor.detach() if name.endswith(FLOAT32) else tensor.detach().to(dtype)
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        for piece in pieces(name, whole.shape, model.names):
            yield piece.name, piece.of(whole)
