"""The ranks that share each micro-batch, every one with a run of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stackrl.runtime.trainer.exchange import all_to_all
from stackrl.runtime.trainer.models.documents import Documents, layout


@dataclass(frozen=True)
class Context:
    """This rank among those that share a micro-batch."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    latent: bool = False
    """Whether attention leaves the queries where they are."""

    def sizes(self, tokens: int) -> list[int]:
        """How many of ``tokens`` tokens each rank has: as many, or one less."""
        return [
            end - begin
            for begin, end in pairwise(tokens * rank // self.ranks for rank in range(self.ranks + 1))
        ]

    def own(self, tokens: int) -> range:
        """The tokens of this rank."""
        return range(tokens * self.rank // self.ranks, tokens * (self.rank + 1) // self.ranks)

    def layout(self, lengths: np.ndarray, device: torch.device) -> Documents:
        """Of documents of ``lengths`` int [D], of whose tokens this rank has a part."""
        own = self.own(int(lengths.sum()))
        return layout(lengths, device, own=own, attending=own if self.latent else None)

    def whole(self, values: Tensor, places: Tensor, length: int) -> Tensor:
        """``values`` [n] at ``places`` int64 [n] of ``length``, with those of the other ranks at theirs."""
        together = values.new_zeros(length).index_copy(0, places, values)
        if self.ranks > 1:
            dist.all_reduce(together, group=self.group)
        return together

    def heads_for_tokens(self, states: Tensor, documents: Documents) -> Tensor:
        """[t, heads, size] of this rank's tokens → [T, heads / ranks, size] of this rank's heads."""
        parts = states.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(parts, [len(states)] * self.ranks, self.sizes(documents.tokens), self.group)

    def tokens_for_heads(self, states: Tensor, documents: Documents) -> Tensor:
        """The way back."""
        own = len(documents.positions)
        parts = all_to_all(states, self.sizes(documents.tokens), [own] * self.ranks, self.group)
        return parts.unflatten(0, (self.ranks, own)).transpose(0, 1).flatten(1, 2)

    def gather(self, states: Tensor, documents: Documents) -> Tensor:
        """[t, ...] of this rank's tokens → [T, ...] of all."""
        copies = states.repeat(self.ranks, *[1] * (states.ndim - 1))
        return all_to_all(copies, [len(states)] * self.ranks, self.sizes(documents.tokens), self.group)
