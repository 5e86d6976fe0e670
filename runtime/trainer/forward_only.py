"""A model that is asked and not trained: no gradients, and nothing of it stays gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from stackrl.runtime.trainer.models.model import Model


@contextmanager
def forward_only(model: Model) -> Iterator[None]:
    """``model`` is only asked within; all ranks come here together."""
    trained = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(trained)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is whole would be let go by a backward pass, and there was none
