"""Multi-head latent attention to the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackrl.runtime.trainer.models import shape as shapes
from stackrl.runtime.trainer.models.documents import Block, Choice, Documents, attend, rows_of
from stackrl.runtime.trainer.models.norm import Norm
from stackrl.runtime.trainer.models.rotary import Rotation, rotate

EPSILON = 1e-6
"""Of the norms inside latent attention, whatever the model's others have."""
SCORED_AT_ONCE = 256
"""Tokens whose scores of all earlier ones are in memory at a time."""


Gather = Callable[[Tensor, Documents], Tensor]
"""From [t, ...] of the tokens that are here to [T, ...] of all of the micro-batch."""


def all_here(states: Tensor, documents: Documents) -> Tensor:
    return states


class LatentAttention(nn.Module):
    """Keys and values of all heads from one small vector per token (arXiv 2405.04434)."""

    def __init__(self, shape: shapes.LatentAttention, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.gather: Gather = all_here
        head_size = shape.plain_size + shape.rotary_size
        self.q_a_proj = nn.Linear(hidden, shape.query_rank, bias=shape.bias)
        self.q_a_layernorm = Norm(shape.query_rank, EPSILON)
        self.q_b_proj = nn.Linear(shape.query_rank, shape.heads * head_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, shape.key_value_rank + shape.rotary_size, bias=shape.bias)
        self.kv_a_layernorm = Norm(shape.key_value_rank, EPSILON)
        self.kv_b_proj = nn.Linear(
            shape.key_value_rank, shape.heads * (shape.plain_size + shape.value_size), bias=False
        )
        self.o_proj = nn.Linear(shape.heads * shape.value_size, hidden, bias=shape.bias)
        if shape.indexer.own:
            self.indexer = Indexer(shape.indexer, hidden, shape.query_rank)

    def forward(
        self, states: Tensor, turn: Rotation, documents: Documents, choice: Choice | None
    ) -> tuple[Tensor, Choice]:
        """``choice``: of the layer before. Returns with the result that of this one."""
        narrow_query = self.q_a_layernorm(self.q_a_proj(states))
        if self.shape.indexer.own:
            choice = self.indexer(states, narrow_query, turn, documents, self.gather)
        query = self._query(narrow_query, turn)
        key, value = self._key_and_value(states, turn, documents)
        mixed = attend(query, key, value, documents, choice)
        return self.o_proj(mixed.flatten(1)), choice

    def _query(self, narrow: Tensor, turn: Rotation) -> Tensor:
        query = self.q_b_proj(narrow).unflatten(-1, (self.shape.heads, -1))
        plain, turning = query.split([self.shape.plain_size, self.shape.rotary_size], dim=-1)
        return torch.cat([plain, rotate(turning, turn)], dim=-1)

    def _key_and_value(self, states: Tensor, turn: Rotation, documents: Documents) -> tuple[Tensor, Tensor]:
        sizes = [self.shape.key_value_rank, self.shape.rotary_size]
        latent, turning = self.kv_a_proj_with_mqa(states).split(sizes, dim=-1)
        narrow = torch.cat([self.kv_a_layernorm(latent), rotate(turning[:, None], turn)[:, 0]], dim=-1)
        latent, turned = self.gather(narrow, documents).split(sizes, dim=-1)
        both = self.kv_b_proj(latent).unflatten(-1, (self.shape.heads, -1))
        plain, value = both.split([self.shape.plain_size, self.shape.value_size], dim=-1)
        return torch.cat([plain, turned[:, None].expand(-1, self.shape.heads, -1)], dim=-1), value


class Indexer(nn.Module):
    """Scores all earlier tokens of the document with few small heads, and keeps the best.

    A choice has no gradient: the indexer stays as it was pretrained, its parameters are frozen.
    """

    def __init__(self, shape: shapes.Indexer, hidden: int, query_rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = nn.Linear(query_rank, shape.heads * shape.size, bias=False)
        self.wk = nn.Linear(hidden, shape.size, bias=False)
        self.k_norm = nn.LayerNorm(shape.size, eps=EPSILON)
        self.weights_proj = nn.Linear(hidden, shape.heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, states: Tensor, narrow_query: Tensor, turn: Rotation, documents: Documents, gather: Gather
    ) -> Choice:
        """For each block of documents the chosen tokens, or None where none of its documents has more."""
        query = rotate(self.wq_b(narrow_query).unflatten(-1, (self.shape.heads, -1)), turn).float()
        key = gather(rotate(self.k_norm(self.wk(states))[:, None], turn)[:, 0].float(), documents)
        weights = self.weights_proj(states).float() * (self.shape.heads * self.shape.size) ** -0.5
        return [
            self._best(block, query, key, weights) if block.keys.shape[1] > self.shape.chosen else None
            for block in documents.blocks
        ]

    def _best(self, block: Block, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        """``query`` [t, heads, size], ``key`` [T, size], ``weights`` [t, heads] → int64 [d, Q, chosen]."""
        columns = torch.arange(block.keys.shape[1], device=key.device)
        places = columns.expand_as(block.queries) if block.places is None else block.places
        query, weights, key = (
            rows_of(query, block.queries),
            rows_of(weights, block.queries),
            rows_of(key, block.keys),
        )
        best = []
        for some in torch.arange(query.shape[1], device=key.device).split(SCORED_AT_ONCE):
            matches = F.relu(torch.einsum("dqhs,dks->dqhk", query[:, some], key))
            scores = torch.einsum("dqh,dqhk->dqk", weights[:, some], matches)
            later = columns > places[:, some, None]
            best.append(scores.masked_fill(later, -torch.inf).topk(self.shape.chosen, sorted=False).indices)
        return torch.cat(best, dim=1)
