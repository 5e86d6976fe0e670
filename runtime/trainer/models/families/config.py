"""What the configs of all families say in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stackrl.runtime.trainer.models.shape import (
    Experts,
    GroupedAttention,
    Layer,
    ModelError,
    Names,
    Rope,
    Shape,
)

Config = dict[str, Any]
NO_NAMES = Names()


def shape(config: Config, rope: Rope, layers: Iterable[Layer], names: Names = NO_NAMES) -> Shape:
    """The whole model, from the rotation, the layers and the names of its family."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"the trainer has no activation {config['hidden_act']!r}, only silu")
    if config.get("attention_dropout"):
        raise ModelError("the trainer has no attention dropout; set attention_dropout to 0")
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        epsilon=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        tied=config.get("tie_word_embeddings", False),
        layers=tuple(layers),
        names=names,
    )


def grouped(config: Config, **differences: Any) -> GroupedAttention:
    """Grouped-query attention, with what is different in a family."""
    heads = config["num_attention_heads"]
    key_value_heads = config.get("num_key_value_heads") or heads
    if heads % key_value_heads:
        raise ModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_value_heads}"
        )
    bias = config.get("attention_bias", False)
    usual = {"bias": bias, "output_bias": bias}
    return GroupedAttention(heads, key_value_heads, _head_size(config), **usual | differences)


def rope(config: Config, size: int = 0, part: float = 1.0, interleaved: bool = False) -> Rope:
    """How heads turn: ``size`` dimensions, or ``part`` of a head where the config does not say which.

    transformers 5 writes `rope_parameters`; older folders `rope_theta`, `partial_rotary_factor` and
    `rope_scaling`.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", part))
    size = size or int(_head_size(config) * part)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta, size, interleaved)
    if kind == "llama3":
        return Rope(
            theta,
            size,
            interleaved,
            parameters["factor"],
            parameters["low_freq_factor"],
            parameters["high_freq_factor"],
            parameters["original_max_position_embeddings"],
        )
    raise ModelError(f"the trainer has no rope scaling {kind!r}, only default and llama3")


def corrected_experts(config: Config) -> Experts:
    """The experts of DeepSeek-V3 and of the GLM models after it."""
    return Experts(
        number=config["n_routed_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        score="sigmoid",
        corrected=True,
        groups=config.get("n_group", 1),
        groups_chosen=config.get("topk_group", 1),
        normalized=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor", 1.0),
        shared=config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
    )


def without_predictors(config: Config) -> Names:
    """The files hold layers behind the last that predict several tokens ahead; they are not trained."""
    layers, more = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return Names(ignored=tuple(f"model.layers.{layers + number}." for number in range(more)))


def _head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
