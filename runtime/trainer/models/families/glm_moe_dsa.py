"""GLM-5: latent attention to the tokens that an indexer chooses, and GLM-4.5's experts."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.runtime.trainer.models.families.config import Config, corrected_experts, rope, without_predictors
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Indexer, LatentAttention, Layer, Mlp, ModelError, Shape


def shape(config: Config) -> Shape:
    turning = rope(config, size=config["qk_rope_head_dim"], interleaved=True)
    return whole(config, turning, _layers(config), without_predictors(config))


def _layers(config: Config) -> Iterator[Layer]:
    dense, sparse = Mlp(config["intermediate_size"]), corrected_experts(config)
    first_sparse = config.get("first_k_dense_replace", 3)
    indexers, mlps = config.get("indexer_types"), config.get("mlp_layer_types")
    if not indexers and (config.get("index_topk_freq", 1) > 1 or config.get("index_topk_pattern")):
        raise ModelError(
            "index_topk_freq and index_topk_pattern are not read: give indexer_types, "
            "as transformers' save_pretrained writes it"
        )
    if indexers and indexers[0] != "full":
        raise ModelError("indexer_types begins with a layer that chooses nothing; the first must be 'full'")
    for number in range(config["num_hidden_layers"]):
        own = not indexers or indexers[number] == "full"
        is_dense = mlps[number] == "dense" if mlps else number < first_sparse
        yield Layer(_attention(config, own), dense if is_dense else sparse)


def _attention(config: Config, own_indexer: bool) -> LatentAttention:
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise ModelError(
            f"latent attention has as many heads of keys as of queries: set num_key_value_heads to {heads}"
        )
    return LatentAttention(
        heads=heads,
        query_rank=config["q_lora_rank"],
        key_value_rank=config["kv_lora_rank"],
        plain_size=config["qk_nope_head_dim"],
        rotary_size=config["qk_rope_head_dim"],
        value_size=config["v_head_dim"],
        bias=config.get("attention_bias", False),
        indexer=Indexer(
            config["index_n_heads"], config["index_head_dim"], config["index_topk"], own=own_indexer
        ),
    )
