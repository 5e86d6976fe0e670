"""Context parallelism: what attention does where ranks share micro-batches. All else works token by token.

Grouped-query attention changes the division for its own time: each rank attends with some of the heads, to
and from all tokens (DeepSpeed Ulysses, arXiv 2309.14509). Latent attention keeps the queries where they are
and gathers what keys and values are made of, which is small.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd

from torch import Tensor

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.models import shape as shapes
from stackrl.runtime.trainer.models.attention import Attention
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import Documents, attend
from stackrl.runtime.trainer.models.latent import LatentAttention
from stackrl.runtime.trainer.models.shape import ModelError, Shape


def share_context(model: Decoder, shape: Shape, context: Context) -> None:
    """Let the ranks of ``context`` share the micro-batches of ``model``.

    Raises ModelError where its heads cannot be divided.
    """
    for layer in shape.layers:
        if isinstance(layer.attention, shapes.GroupedAttention):
            _check(layer.attention, context.ranks)
    latent = isinstance(shape.layers[0].attention, shapes.LatentAttention)
    model.context = replace(context, latent=latent)
    for layer in model.model.layers:
        match layer.self_attn:
            case Attention():
                layer.self_attn.attend = partial(attend_with_some_heads, context)
            case LatentAttention():
                layer.self_attn.gather = context.gather


def attend_with_some_heads(
    context: Context, query: Tensor, key: Tensor, value: Tensor, documents: Documents
) -> Tensor:
    """As `attend`, of the tokens of one rank, whose ``documents`` are those of all."""
    copies = context.ranks // gcd(context.ranks, key.shape[1])  # heads of keys may be fewer than ranks
    query = context.heads_for_tokens(query, documents)
    key, value = (
        context.heads_for_tokens(states.repeat_interleave(copies, dim=1), documents)
        for states in (key, value)
    )
    return context.tokens_for_heads(attend(query, key, value, documents), documents)


def _check(attention: shapes.GroupedAttention, ranks: int) -> None:
    key_heads = attention.key_value_heads * ranks // gcd(ranks, attention.key_value_heads)
    if attention.heads % ranks or attention.heads % key_heads:
        raise ModelError(
            f"{ranks} ranks cannot share {attention.heads} query heads over {attention.key_value_heads} "
            "heads of keys; set trainer.parallel.context to a number that divides both"
        )
