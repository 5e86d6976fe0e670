"""Grouped-query attention."""

from __future__ import annotations

from torch import Tensor, nn

from stackrl.runtime.trainer.models.documents import Documents, attend
from stackrl.runtime.trainer.models.norm import Norm
from stackrl.runtime.trainer.models.rotary import Rotation, rotate
from stackrl.runtime.trainer.models.shape import GroupedAttention


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, shape: GroupedAttention, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.head_size, self.norm = shape.head_size, shape.norm
        self.attend = attend
        queries, keys = shape.heads * shape.head_size, shape.key_value_heads * shape.head_size
        self.q_proj = nn.Linear(hidden, queries, bias=shape.bias)
        self.k_proj = nn.Linear(hidden, keys, bias=shape.bias)
        self.v_proj = nn.Linear(hidden, keys, bias=shape.bias)
        self.o_proj = nn.Linear(queries, hidden, bias=shape.output_bias)
        if shape.norm != "none":
            whole = shape.norm == "whole"
            self.q_norm = Norm(queries if whole else shape.head_size, epsilon)
            self.k_norm = Norm(keys if whole else shape.head_size, epsilon)

    def forward(self, states: Tensor, turn: Rotation, documents: Documents) -> Tensor:
        query, key, value = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        if self.norm == "whole":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in (query, key, value))
        if self.norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = self.attend(rotate(query, turn), rotate(key, turn), value, documents)
        return self.o_proj(mixed.flatten(1))
