"""What layers keep for the backward pass: less of it, the rest being computed again, or in host memory.

Applied to a model from outside. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from stackrl.runtime.trainer.host_memory import Stowed
from stackrl.runtime.trainer.models.decoder import Layer
from stackrl.runtime.trainer.models.mlp import Experts, Mlp
from stackrl.runtime.trainer.models.norm import Norm
from stackrl.runtime.trainer.models.shape import ModelError

if TYPE_CHECKING:  # benchmarks/gpu_trainer.py runs where there is no pydantic
    from stackrl.runtime.trainer.models.model import Model
    from stackrl.schemas.activations import Checkpointing

SMALL = 1024
"""Tensors of fewer bytes stay where they are."""


def keep_less(model: Model, checkpointing: Checkpointing, *, offloading: bool) -> None:
    """Compute again what ``checkpointing`` names; with ``offloading`` move what is still kept to the host.

    Raises ModelError where it names parts of a model that is transformers' own.
    """
    for layer in model.layers:
        for module in _recomputed(layer, checkpointing):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        if offloading:
            layer.forward = _stowing(layer)


def _recomputed(layer: nn.Module, checkpointing: Checkpointing) -> list[nn.Module]:
    """The outermost modules of ``layer`` that keep nothing but their inputs."""
    if checkpointing == "none":
        return []
    if checkpointing == "full":
        return [layer]
    if not isinstance(layer, Layer):
        raise ModelError(
            "trainer.activation_checkpointing: parts are those of the trainer's own model families, and this "
            "model runs through the code of transformers; say full or none"
        )
    parts = {
        "attention": [layer.self_attn],
        "mlp": [module for module in layer.modules() if isinstance(module, Mlp)],
        "experts": [module for module in layer.modules() if isinstance(module, Experts)],
        "norms": [module for module in layer.modules() if isinstance(module, Norm)],
    }
    chosen = [module for part in dict.fromkeys(checkpointing.parts) for module in parts[part]]
    inner = {id(part) for module in chosen for part in module.modules() if part is not module}
    return [module for module in chosen if id(module) not in inner]


def _stowing(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module``, whose saved tensors go to the host."""
    forward = module.forward

    @wraps(forward)
    def stowing(*arguments: Any, **options: Any) -> Any:
        shared = [value for a in arguments if is_dataclass(a) for value in vars(a).values()]
        shared = [value for value in shared if isinstance(value, Tensor)]
        # asked anew for each tensor: weights of experts are gathered on the way
        with _saved_on_host(staying=lambda: map(_memory, (*module.parameters(), *shared))):
            return forward(*arguments, **options)

    return stowing


@contextmanager
def _saved_on_host(staying: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Save tensors for the backward pass in host memory, but for those in the memory that is ``staying``.

    Several tensors that share memory are moved once.
    """
    moved: dict[tuple[int, int], Stowed] = {}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if not tensor.is_floating_point() or tensor.nbytes < SMALL or _memory(tensor) in staying():
            return tensor
        key = (_memory(tensor), tensor._version)
        if key not in moved:
            moved[key] = Stowed(tensor)
        return moved[key].part(tensor)

    with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else packed()):
        yield
    for stowed in moved.values():
        stowed.let_go()


def _memory(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
