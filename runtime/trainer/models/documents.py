"""Packed documents: where each begins, its positions, and attention that does not look across them.

T tokens of D documents lie back to back. Attention pads documents of similar length (the same power of
two) to one dense block, so that padding stays below half of it whatever the mix of lengths, and runs one
causal kernel per block. Everything else in the model works on the packed tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Documents:
    """The layout of one packed micro-batch. Made by `layout`."""

    positions: Tensor
    """int64 [T]: place of each token in its document."""
    blocks: list[Tensor]
    """int64 [d, L] each: the tokens of d documents, padded at the end to the longest of them."""
    order: Tensor
    """int64 [T]: where each token lies in the blocks, flattened and concatenated."""


def layout(lengths: np.ndarray, device: torch.device | str = "cpu") -> Documents:
    """Lay out documents of ``lengths`` int [D], all > 0."""
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    order = np.empty_like(positions)
    blocks, base = [], 0
    sizes = np.ceil(np.log2(lengths)).astype(np.int64)
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size)
        longest = int(lengths[members].max())
        columns = np.arange(longest)
        real = columns < lengths[members, None]
        # a padded place repeats the document's last token: being later, no real token attends to it
        block = starts[members, None] + np.minimum(columns, lengths[members, None] - 1)
        order[block[real]] = base + np.flatnonzero(real)
        base += block.size
        blocks.append(torch.from_numpy(block).to(device))
    return Documents(torch.from_numpy(positions).to(device), blocks, torch.from_numpy(order).to(device))


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Causal attention within each document.

    ``query`` [T, heads, size], ``key`` and ``value`` [T, key_value_heads, size] → [T, heads, size].
    """
    results = []
    for block in documents.blocks:
        q, k, v = (_gather(states, block) for states in (query, key, value))
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        results.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, documents.order)


def _gather(states: Tensor, block: Tensor) -> Tensor:
    """[T, heads, size] → [d, heads, L, size]."""
    return states.index_select(0, block.flatten()).unflatten(0, block.shape).transpose(1, 2)
