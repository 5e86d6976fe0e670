"""Tiny random models, versions of their weights that differ visibly, and what each would have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    MiniMaxM2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 264
BYTES = 256
"""Tokens below this are no special ones."""
_SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=263,
    pad_token_id=262,
)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
_GLM_EXPERTS = dict(
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
)
_LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=32,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=12,
)


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Of ``qwen3``, ``qwen3-moe``, each with ``-tied`` behind it or not, ``llama``, ``glm4-moe``, ``glm5`` or
    ``minimax-m2``, with ``changes`` in transformers' words."""
    family, _, variant = kind.partition("-")
    if family == "glm4":
        return Glm4MoeConfig(**_SHAPE | _GLM_EXPERTS | changes)
    if family == "glm5":
        return GlmMoeDsaConfig(**_SHAPE | {"head_dim": 16} | _GLM_EXPERTS | _LATENT | changes)
    if family == "minimax":
        parts = dict(intermediate_size=32, num_local_experts=16, num_experts_per_tok=3)
        return MiniMaxM2Config(**_SHAPE | parts | changes)
    if family == "llama":
        return LlamaConfig(**_SHAPE | {"head_dim": None} | changes)
    tied = {"tie_word_embeddings": variant.endswith("tied")}
    if variant.startswith("moe"):
        return Qwen3MoeConfig(**_SHAPE | _EXPERTS | tied | changes)
    return Qwen3Config(**_SHAPE | tied | changes)


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """With random weights, the same every time, in float32."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


class Versions:
    """One model with the weights of any version; number 0 is the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._number = model, 0
        self._first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    @torch.no_grad()
    def set(self, number: int) -> PreTrainedModel:
        """The model with the weights of version ``number``."""
        if number == self._number:
            return self.model
        generator = torch.Generator().manual_seed(number)
        for name, tensor in self.model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(self._first[name] * (1 + (0.1 * noise if number else 0)))
        self._number = number
        return self.model

    def tensors(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """What a trainer publishes as ``number``: checkpoint names, experts apart, a tied head once."""
        model = self.set(number)
        tensors: list[tuple[str, torch.Tensor]] = []
        for name, tensor in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                for expert, weight in enumerate(tensor):
                    stem = name.removesuffix("gate_up_proj") + f"{expert}."
                    gate, up = weight.chunk(2)
                    tensors += [(stem + "gate_proj.weight", gate), (stem + "up_proj.weight", up)]
            elif name.endswith("experts.down_proj"):
                stem = name.removesuffix("down_proj")
                tensors += [
                    (f"{stem}{expert}.down_proj.weight", weight) for expert, weight in enumerate(tensor)
                ]
            else:
                tensors.append((name, tensor))
        return tensors

    @torch.no_grad()
    def logprobs(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int, int]],
        *,
        kv: str,
        temperature: float = 1.0,
        newer_keys_from: int = -1,
        prefilled: int | None = None,
    ) -> torch.Tensor:
        """Logprobs [T] of ``tokens`` after ``prompt``, each by the version of its span (start, end, number).

        With ``kv`` keep, a version attends to the keys that the versions before it have cached; with
        recompute, to its own. ``newer_keys_from`` says at which token, counted from the start of a span, the
        keys of that span's version begin: -1, the last token before it. ``prefilled``: the version that made
        the prompt's keys in an engine of its own, up to the last token's.
        """
        parts, cache = [], DynamicCache()
        everything = torch.tensor([[*prompt, *tokens]])
        fetched = 0 if prefilled is None else len(prompt) - 1
        if fetched:
            self.set(prefilled)(everything[:, :fetched], past_key_values=cache)
        for start, end, number in spans:
            model = self.set(number)
            first = len(prompt) + start + newer_keys_from if start else fetched
            last = len(prompt) + end - 1
            if kv == "recompute":
                logits = model(everything[:, :last]).logits[0, -(end - start) :]
            else:
                if start:
                    cache.crop(first)
                logits = model(everything[:, first:last], past_key_values=cache).logits[0, -(end - start) :]
            scores = log_softmax(logits.double() / temperature, dim=-1)
            parts.append(scores.gather(1, torch.tensor(tokens[start:end])[:, None])[:, 0])
        return torch.cat(parts)
