"""A decoder on packed tokens. Parameters carry the names that transformers gives them.

Written for one device; parallelize.py shards it from outside. What its blocks are is in `Shape`, which the
families (families/) make; what its files call the parameters, in names.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.head import token_logprobs
from stackrl.runtime.trainer.models import shape as shapes
from stackrl.runtime.trainer.models.attention import Attention
from stackrl.runtime.trainer.models.documents import Choice, Documents
from stackrl.runtime.trainer.models.latent import LatentAttention
from stackrl.runtime.trainer.models.mlp import Mixture, Mlp
from stackrl.runtime.trainer.models.norm import Norm
from stackrl.runtime.trainer.models.rotary import Rotation, rotation
from stackrl.runtime.trainer.models.shape import Shape


class Decoder(nn.Module):
    """The whole model: a body that makes hidden states, and a head that scores chosen tokens."""

    def __init__(self, shape: Shape, *, head_chunk: int = 512) -> None:
        """``head_chunk``: tokens per chunk of the head."""
        super().__init__()
        self.names = shape.names
        self.head_chunk = head_chunk
        self.context = Context()
        self.model = Body(shape)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        """[V, H]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        tokens: Tensor,
        documents: Documents,
        predictors: Tensor,
        targets: Tensor,
        temperatures: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logprob and entropy, float32 [N], of the distribution that each of N target tokens came from.

        ``tokens`` int64 [t], those that are here; ``targets`` int64 [N], and ``predictors`` int64 [N], the
        places of the tokens before them; ``temperatures`` float32 [N]. The entropy carries no gradient. Head
        and body share this one forward because sharded parameters are whole only inside it.
        """
        hidden = self.model(tokens, documents)
        return token_logprobs(
            hidden.index_select(0, predictors),
            self.head_weight,
            targets,
            temperatures,
            self.head_chunk,
        )


class Body(nn.Module):
    """Everything below the head: tokens int64 [T] → hidden states [T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rope = shape.rope
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(layer, shape) for layer in shape.layers)
        self.norm = Norm(shape.hidden, shape.epsilon)

    def forward(self, tokens: Tensor, documents: Documents) -> Tensor:
        states = self.embed_tokens(tokens)
        turn = rotation(documents.positions, self.rope, states.dtype)
        choice = None
        for layer in self.layers:
            # one that is run again for the backward pass keeps what it is given
            states, choice = layer(states, turn, documents, choice if layer.follows else None)
        return self.norm(states)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, layer: shapes.Layer, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.sparse = isinstance(layer.attention, shapes.LatentAttention)
        self.follows = self.sparse and not layer.attention.indexer.own
        """Whether it looks at the tokens that the layer before chose."""
        if self.sparse:
            self.self_attn = LatentAttention(layer.attention, shape.hidden)
        else:
            self.self_attn = Attention(layer.attention, shape.hidden, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        mixture = isinstance(layer.mlp, shapes.Experts)
        self.mlp = Mixture(layer.mlp, shape.hidden) if mixture else Mlp(layer.mlp, shape.hidden)

    def forward(
        self, states: Tensor, turn: Rotation, documents: Documents, choice: Choice | None
    ) -> tuple[Tensor, Choice | None]:
        """``choice``: the tokens that sparse attention of the layer before chose; this one's is returned."""
        mixed = self.input_layernorm(states)
        if self.sparse:
            mixed, choice = self.self_attn(mixed, turn, documents, choice)
        else:
            mixed = self.self_attn(mixed, turn, documents)
        states = states + mixed
        return states + self.mlp(self.post_attention_layernorm(states)), choice
