"""Qwen3's mixtures of experts (30B-A3B, 235B-A22B): softmax scores, no shared expert."""

from __future__ import annotations

from stackrl.runtime.trainer.models.families.config import Config, grouped, rope
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.families.qwen3 import refuse_window
from stackrl.runtime.trainer.models.shape import Experts, Layer, Mlp, Shape


def shape(config: Config) -> Shape:
    refuse_window(config)
    attention = grouped(config, norm="head")
    dense, sparse = Mlp(config["intermediate_size"]), _experts(config)
    step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return whole(
        config,
        rope(config),
        (
            Layer(attention, dense if number in dense_layers or (number + 1) % step else sparse)
            for number in range(config["num_hidden_layers"])
        ),
    )


def _experts(config: Config) -> Experts:
    return Experts(
        # transformers 5 has a second word for it
        number=config.get("num_local_experts") or config["num_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        score="softmax",
        normalized=config.get("norm_topk_prob", False),
    )
