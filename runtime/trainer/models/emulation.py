"""bfloat16 on processors that have no instructions for it.

torch multiplies such numbers one by one there, ten to fifty times slower than float32. The same product is
made in float32 and rounded: what instructions for bfloat16 do as well, they sum in float32.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@cache
def emulated(device: str, dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` are better made in float32 on ``device``, `cpu` or `cuda`."""
    return device == "cpu" and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widen_products(model: nn.Module) -> None:
    """Let the linear layers of ``model``, which computes in bfloat16, multiply in float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, states: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.float()
    return F.linear(states.float(), module.weight.float(), bias).to(states.dtype)
