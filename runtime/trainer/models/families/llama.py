"""Llama 2 and 3, SmolLM2, and what else calls itself llama."""

from __future__ import annotations

from stackrl.runtime.trainer.models.families.config import Config, grouped, rope
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Layer, Mlp, Shape


def shape(config: Config) -> Shape:
    layer = Layer(grouped(config), Mlp(config["intermediate_size"], config.get("mlp_bias", False)))
    return whole(config, rope(config), [layer] * config["num_hidden_layers"])
