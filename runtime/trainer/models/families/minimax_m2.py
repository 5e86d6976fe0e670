"""MiniMax-M2 and M2.5: a norm over all heads' queries and keys together, half of each head turns."""

from __future__ import annotations

from stackrl.runtime.trainer.models.families.config import Config, grouped, rope
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Experts, Layer, ModelError, Names, Shape

NAMES = Names(
    expert=("w1", "w3", "w2"),
    parts=(
        (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
        (".mlp.", ".block_sparse_moe."),
    ),
)


def shape(config: Config) -> Shape:
    if config.get("router_jitter_noise"):
        raise ModelError("the trainer has no noise in the router; set router_jitter_noise to 0")
    config = {"head_dim": 128, "rope_theta": 5e6} | config
    attention = grouped(config, norm="whole", bias=False, output_bias=False)
    experts = Experts(
        number=config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=config["intermediate_size"],
        score="sigmoid",
        corrected=True,
    )
    turning = config.get("rotary_dim") or 0  # what the published folders say
    layers = [Layer(attention, experts)] * config["num_hidden_layers"]
    return whole(config, rope(config, size=turning), layers, NAMES)
