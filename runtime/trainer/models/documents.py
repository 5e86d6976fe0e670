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
class Block:
    """d documents of similar length, padded at the end to the longest."""

    keys: Tensor
    """int64 [d, L]: tokens that are attended to."""
    queries: Tensor
    """int64 [d, Q]: tokens that attend, counted from the first one that does here."""
    places: Tensor | None
    """int64 [d, Q]: where in its document each of them lies; None where all attend: then they are keys."""


@dataclass(frozen=True)
class Documents:
    """The layout of one packed micro-batch, or of the part of it that is here. Made by `layout`."""

    tokens: int
    """T, of the whole micro-batch."""
    positions: Tensor
    """int64 [t]: place in its document of each token that is here."""
    blocks: list[Block]
    order: Tensor
    """int64 [tokens that attend]: where each lies in the blocks' queries, flattened and concatenated."""


def layout(
    lengths: np.ndarray,
    device: torch.device | str = "cpu",
    *,
    own: range | None = None,
    attending: range | None = None,
) -> Documents:
    """Lay out documents of ``lengths`` int [D], all > 0.

    ``own``: the tokens that are here; ``attending``: those that attend, to all. By default all T.
    """
    lengths = lengths.astype(np.int64)
    total = int(lengths.sum())
    own = range(total) if own is None else own
    attending = range(total) if attending is None else attending
    starts = np.cumsum(lengths) - lengths
    positions = (np.arange(total) - np.repeat(starts, lengths))[own.start : own.stop]
    # the places in each document at which attending begins and ends: nobody attends to what comes after
    first, last = (np.clip(edge - starts, 0, lengths) for edge in (attending.start, attending.stop))
    first, last, starts = (edge[first < last] for edge in (first, last, starts))
    order = np.empty(len(attending), np.int64)
    blocks, base = [], 0
    sizes = np.ceil(np.log2(last)).astype(np.int64)
    for size in np.unique(sizes):
        begin, first_place, end = (edges[sizes == size, None] for edges in (starts, first, last))
        # a padded place repeats the document's last token: being later, no real token attends to it
        keys = begin + np.minimum(np.arange(end.max()), end - 1)
        columns = np.arange((end - first_place).max())
        places = np.minimum(first_place + columns, end - 1)
        queries = begin + places - attending.start
        real = columns < end - first_place
        order[queries[real]] = base + np.flatnonzero(real)
        base += queries.size
        tensors = [torch.from_numpy(array).to(device) for array in (keys, queries, places)]
        blocks.append(Block(*tensors[:2], tensors[2] if len(attending) < total else None))
    return Documents(
        total, torch.from_numpy(positions).to(device), blocks, torch.from_numpy(order).to(device)
    )


Choice = list[Tensor | None]
"""For each block, which of its places each of its queries attends to, int64 [d, Q, chosen]: those that lie
later do not count. None: all earlier ones."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, choice: Choice | None = None
) -> Tensor:
    """Causal attention within each document, to all tokens or to the chosen ones.

    ``query`` [tokens that attend, heads, size], ``key`` [T, key_value_heads, size], ``value`` [T,
    key_value_heads, value size] → [tokens that attend, heads, value size].
    """
    results = []
    for block, chosen in zip(documents.blocks, choice or [None] * len(documents.blocks), strict=True):
        whole = block.places is None and chosen is None
        parts = (rows_of(query, block.queries), rows_of(key, block.keys), rows_of(value, block.keys))
        result = F.scaled_dot_product_attention(
            *(states.transpose(1, 2) for states in parts),
            attn_mask=None if whole else _mask(block, chosen),
            is_causal=whole,
            enable_gqa=True,
        )
        results.append(result.transpose(1, 2).flatten(0, 1))
    if not results:  # nothing attends here; the gradients of keys and values are none, but there they are
        return value[:0].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.cat(results).index_select(0, documents.order)


def rows_of(states: Tensor, tokens: Tensor) -> Tensor:
    """[T, ...] → [d, L, ...], for ``tokens`` int64 [d, L]."""
    return states.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


def _mask(block: Block, chosen: Tensor | None) -> Tensor:
    """bool [d, 1, Q, L]: not later, and chosen where int64 [d, Q, chosen] says which are."""
    columns = torch.arange(block.keys.shape[1], device=block.keys.device)
    places = columns.expand_as(block.queries) if block.places is None else block.places
    earlier = columns <= places[..., None]
    if chosen is not None:
        earlier &= torch.zeros_like(earlier).scatter_(-1, chosen, True)
    return earlier[:, None]
