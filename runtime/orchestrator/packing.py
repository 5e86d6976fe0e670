"""Pack sequences into micro-batches, and deal those to the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
Bin = list[int]
"""Positions of the sequences that share a micro-batch."""


def causal_cost(hidden_size: int) -> Cost:
    """FLOPs of a sequence of n tokens in a causal transformer, up to a constant: n (1 + n / (6 hidden)).

    Per layer and token about 24 hidden² in the matrix products and 4 hidden · n in attention, of which causal
    kernels compute half. Grouped heads and gated layers shift the ratio a little; it is only used to balance.
    """
    return lambda length: length * (1 + length / (6 * hidden_size))


def pack(lengths: Sequence[int], capacity: int, ranks: int, cost: Cost) -> list[list[Bin]]:
    """Per rank its micro-batches, as positions in ``lengths``; all ranks have the same number of them.

    First-fit-decreasing says how many micro-batches of ``capacity`` tokens each rank needs. Then each
    sequence, the costliest first, goes to the rank with the least to do that has room for it. Where that
    leaves one without room, the bins of first-fit-decreasing are dealt whole. Empty bins fill up the ranks.
    Raises ValueError for a sequence longer than ``capacity``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > capacity:
        raise ValueError(f"a sequence of {lengths[order[0]]} tokens does not fit micro-batches of {capacity}")
    bins = _first_fit(order, lengths, capacity)
    per_rank = max(1, -(-len(bins) // ranks))
    return _deal_sequences(order, lengths, capacity, ranks, per_rank, cost) or _deal_bins(
        bins, lengths, ranks, per_rank, cost
    )


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[Bin]:
    bins: list[Bin] = []
    room: list[int] = []
    for i in order:
        place = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def _deal_sequences(
    order: Sequence[int], lengths: Sequence[int], capacity: int, ranks: int, per_rank: int, cost: Cost
) -> list[list[Bin]] | None:
    """None where a sequence finds no room."""
    dealt: list[list[Bin]] = [[[] for _ in range(per_rank)] for _ in range(ranks)]
    room = [[capacity] * per_rank for _ in range(ranks)]
    load = [0.0] * ranks
    for i in order:
        places = [
            (load[rank], rank, b)
            for rank in range(ranks)
            for b in range(per_rank)
            if lengths[i] <= room[rank][b]
        ]
        if not places:
            return None
        _, rank, b = min(places)
        dealt[rank][b].append(i)
        room[rank][b] -= lengths[i]
        load[rank] += cost(lengths[i])
    return dealt


def _deal_bins(
    bins: list[Bin], lengths: Sequence[int], ranks: int, per_rank: int, cost: Cost
) -> list[list[Bin]]:
    """The costliest bin first, each to the rank with the least to do that has not got its number."""
    costs = [sum(cost(lengths[i]) for i in content) for content in bins]
    dealt: list[list[Bin]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for b in sorted(range(len(bins)), key=lambda b: (-costs[b], b)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=lambda r: (load[r], r))
        dealt[rank].append(bins[b])
        load[rank] += costs[b]
    return [bins + [[]] * (per_rank - len(bins)) for bins in dealt]
