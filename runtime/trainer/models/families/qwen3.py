"""Qwen3's dense models: as Llama, with a norm on each head's query and key."""

from __future__ import annotations

from stackrl.runtime.trainer.models.families.config import Config, grouped, rope
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Layer, Mlp, ModelError, Shape


def shape(config: Config) -> Shape:
    refuse_window(config)
    config = {"head_dim": 128} | config
    layer = Layer(grouped(config, norm="head"), Mlp(config["intermediate_size"]))
    return whole(config, rope(config), [layer] * config["num_hidden_layers"])


def refuse_window(config: Config) -> None:
    if config.get("use_sliding_window"):
        raise ModelError(
            f"this {config['model_type']} model uses a sliding attention window, "
            "which the trainer does not have"
        )
