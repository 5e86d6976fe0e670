"""A dense decoder on packed tokens. Parameters carry the names that Hugging Face gives them.

Written for one device; parallelize.py shards it from outside. The families (families.py) differ in a few
switches of `Shape`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stackrl.runtime.trainer.head import token_logprobs
from stackrl.runtime.trainer.models.documents import Documents, attend
from stackrl.runtime.trainer.models.families import Rope, Shape


class Decoder(nn.Module):
    """The whole model: a body that makes hidden states, and a head that scores chosen tokens."""

    def __init__(self, shape: Shape, *, head_chunk: int = 1024, recompute: bool = False) -> None:
        """``head_chunk``: tokens per chunk of the head; ``recompute``: layers keep no activations."""
        super().__init__()
        self.head_chunk = head_chunk
        self.model = Body(shape, recompute)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, H]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self, tokens: Tensor, documents: Documents, chosen: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logprob and entropy, float32 [N], of the distribution that each of N chosen tokens came from.

        ``tokens`` int64 [T]; ``chosen`` int64 [N], indices of tokens that are not their document's first;
        ``temperatures`` float32 [N]. The entropy carries no gradient. Head and body share this one forward
        because sharded parameters are whole only inside it.
        """
        hidden = self.model(tokens, documents)
        return token_logprobs(
            hidden.index_select(0, chosen - 1),
            self.head_weight,
            tokens.index_select(0, chosen),
            temperatures,
            self.head_chunk,
        )


class Body(nn.Module):
    """Everything below the head: tokens int64 [T] → hidden states [T, H]."""

    def __init__(self, shape: Shape, recompute: bool) -> None:
        super().__init__()
        self.rope, self.head_size = shape.rope, shape.head_size
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, recompute) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)

    def forward(self, tokens: Tensor, documents: Documents) -> Tensor:
        states = self.embed_tokens(tokens)
        rotation = rotary(documents.positions, self.head_size, self.rope, states.dtype)
        for layer in self.layers:
            states = layer(states, rotation, documents)
        return self.norm(states)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, states, rotation, documents, use_reentrant=False)
        return self._forward(states, rotation, documents)

    def _forward(self, states: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), rotation, documents)
        return states + self.mlp(self.post_attention_layernorm(states))


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        queries, keys = shape.heads * shape.head_size, shape.key_value_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, queries, bias=shape.attention_bias)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=shape.attention_bias)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=shape.attention_bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.attention_bias)
        norms = (Norm(shape.head_size, shape.epsilon) for _ in range(2))
        self.q_norm, self.k_norm = norms if shape.query_key_norm else (nn.Identity(), nn.Identity())

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        query, key, value = (
            project(states).unflatten(-1, (-1, self.head_size))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(self.q_norm(query), rotation), rotate(self.k_norm(key), rotation)
        return self.o_proj(attend(query, key, value, documents).flatten(1))


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), computed in float32 and rounded before the weight, as the engines do."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(states.dtype)


def rotary(positions: Tensor, size: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's rotation, [T, 1, size] in ``dtype``."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions[:, None].float() * _stretched(1.0 / rope.theta**exponents, rope)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [T, heads, size]; dimension i turns together with i + size / 2."""
    cosine, sine = rotation
    low, high = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-high, low], dim=-1) * sine


def _stretched(frequencies: Tensor, rope: Rope) -> Tensor:
    """Llama 3's scaling: long wavelengths divided by ``factor``, short ones kept, a ramp between."""
    if rope.factor == 1.0:
        return frequencies
    turns = rope.original_length * frequencies / (2 * math.pi)
    ramp = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, ramp.clamp(0, 1))
