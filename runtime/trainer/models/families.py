"""From a Hugging Face config to the shape of our decoder: one short mapping per model family."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(Exception):
    """A model that cannot be used. The text says which, why, and what to do."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), with Llama 3's stretch of the long wavelengths."""

    theta: float
    factor: float = 1.0
    """1 leaves the frequencies as they are."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Shape:
    """Everything that the decoder is built from."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    epsilon: float
    rope: Rope
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    initializer_range: float


def llama(config: dict[str, Any]) -> Shape:
    """Llama 2 and 3, SmolLM2, and what else calls itself llama."""
    return _dense(config, mlp_bias=config.get("mlp_bias", False))


def qwen3(config: dict[str, Any]) -> Shape:
    """Qwen3's dense models: as Llama, with a norm on each head's query and key."""
    if config.get("use_sliding_window"):
        raise ModelError("this qwen3 model uses a sliding attention window, which the trainer does not have")
    return _dense({"head_dim": 128} | config, query_key_norm=True)


FAMILIES: dict[str, Callable[[dict[str, Any]], Shape]] = {"llama": llama, "qwen3": qwen3}
"""By the config's `model_type`."""


def shape_of(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face ``folder``. Raises ModelError where the trainer lacks it."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder") from None
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"the trainer has no model family {family!r} ({folder}); it has {', '.join(FAMILIES)}"
        )
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error.args[0]!r}") from None


def _dense(config: dict[str, Any], *, mlp_bias: bool = False, query_key_norm: bool = False) -> Shape:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"the trainer has no activation {config['hidden_act']!r}, only silu")
    if config.get("attention_dropout"):
        raise ModelError("the trainer has no attention dropout; set attention_dropout to 0")
    heads = config["num_attention_heads"]
    key_value_heads = config.get("num_key_value_heads") or heads
    if heads % key_value_heads:
        raise ModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_value_heads}"
        )
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        epsilon=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tied=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", False),
        mlp_bias=mlp_bias,
        query_key_norm=query_key_norm,
        initializer_range=config.get("initializer_range", 0.02),
    )


def _rope(config: dict[str, Any]) -> Rope:
    """transformers 5 writes `rope_parameters`; older folders `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(
            theta,
            parameters["factor"],
            parameters["low_freq_factor"],
            parameters["high_freq_factor"],
            parameters["original_max_position_embeddings"],
        )
    raise ModelError(f"the trainer has no rope scaling {kind!r}, only default and llama3")
