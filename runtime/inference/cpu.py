"""Mends of two faults of vLLM 0.32 on CPU that leave wrong weights behind a reload, without an error.

Both come from oneDNN's prepacked copies. Each is a no-op where there is nothing to mend; neither may run on
another platform.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def experts_packed_again(model: torch.nn.Module) -> Iterator[None]:
    """Around a reload: experts are packed as at the first load.

    ``UnquantizedFusedMoEMethod`` takes a present kernel as a sign that the weights are already in its
    format and copies the unpacked experts over the packed ones. Without the kernel it runs its whole first
    load. A layer that the reload leaves alone gets its kernel back.
    """
    kernels = {
        method: method.moe_kernel
        for module in model.modules()
        if getattr(method := getattr(module, "quant_method", None), "moe_kernel", None) is not None
    }
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def pack_embeddings_again(model: torch.nn.Module) -> None:
    """After a reload: refresh the packed copy of an embedding that is used as the language-model head.

    A tied head keeps the copy it was given at the first load, and logits come from the old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
