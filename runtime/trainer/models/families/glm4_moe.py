"""GLM-4.5, 4.6, 4.7, Air, and INTELLECT-3: half of each head turns, a shared expert, dense layers first."""

from __future__ import annotations

from stackrl.runtime.trainer.models.families.config import (
    Config,
    corrected_experts,
    grouped,
    rope,
    without_predictors,
)
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Layer, Mlp, Shape


def shape(config: Config) -> Shape:
    norm = "head" if config.get("use_qk_norm") else "none"
    attention = grouped(config, norm=norm, output_bias=False)
    dense, sparse = Mlp(config["intermediate_size"]), corrected_experts(config)
    first_sparse = config.get("first_k_dense_replace", 1)
    return whole(
        config,
        rope(config, part=0.5),
        (
            Layer(attention, dense if number < first_sparse else sparse)
            for number in range(config["num_hidden_layers"])
        ),
        without_predictors(config),
    )
