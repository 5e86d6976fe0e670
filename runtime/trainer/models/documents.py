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


Choice = list[Tensor | None]
"""For each block, which of its places each one attends to, int64 [d, L, chosen]: those that lie later do not
count. None: all earlier ones."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, choice: Choice | None = None
) -> Tensor:
    """Causal attention within each document, to all tokens or to the chosen ones.

    ``query`` [T, heads, size], ``key`` [T, key_value_heads, size], ``value`` [T, key_value_heads, value size]
    → [T, heads, value size].
    """
    results = []
    queries, keys, values = (blocks_of(states, documents) for states in (query, key, value))
    for q, k, v, chosen in zip(queries, keys, values, choice or [None] * len(queries), strict=True):
        result = F.scaled_dot_product_attention(
            *(states.transpose(1, 2) for states in (q, k, v)),
            attn_mask=None if chosen is None else _mask(chosen),
            is_causal=chosen is None,
            enable_gqa=True,
        )
        results.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, documents.order)


def blocks_of(states: Tensor, documents: Documents) -> list[Tensor]:
    """[T, ...] → [d, L, ...] for each block."""
    return [states.index_select(0, block.flatten()).unflatten(0, block.shape) for block in documents.blocks]


def _mask(chosen: Tensor) -> Tensor:
    """int64 [d, L, chosen] → bool [d, 1, L, L]: chosen, and not later."""
    documents, length, _ = chosen.shape
    mask = torch.zeros(documents, length, length, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(-1, chosen, True).tril_()[:, None]
