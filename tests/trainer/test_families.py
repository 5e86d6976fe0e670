"""Each family against transformers: the same numbers from the same files, and files that both can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BYTES, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from stackrl.runtime.trainer.activations import keep_less
from stackrl.runtime.trainer.models import folder, latent
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.families import ModelError, shape_of
from stackrl.runtime.trainer.models.shape import Shape
from stackrl.runtime.trainer.parallelize import gathered

IDLE = 5
"""The expert that gets no token."""
HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
SHARING = ["full", "shared", "full"]
CASES = {
    "llama": tiny_config("llama"),
    "qwen3": tiny_config("qwen3"),
    "qwen3_moe": tiny_config("qwen3-moe", num_experts=16, num_hidden_layers=3, mlp_only_layers=[1]),
    "qwen3_moe, raw weights": tiny_config("qwen3-moe", num_experts=16, norm_topk_prob=False),
    "glm4_moe": tiny_config("glm4-moe", use_qk_norm=True, rope_parameters=HALF),
    "glm4_moe, biases, ungrouped": tiny_config("glm4-moe", attention_bias=True, n_group=1, topk_group=1),
    "glm_moe_dsa": tiny_config("glm5"),
    "glm_moe_dsa, shared choice": tiny_config("glm5", num_hidden_layers=3, indexer_types=SHARING),
    "minimax_m2": tiny_config("minimax-m2", rope_parameters=HALF),
}
MIXTURES = {name: config for name, config in CASES.items() if name not in ("llama", "qwen3")}
LENGTHS = [9, 30, 2, 70, 17]


@pytest.fixture(autouse=True)
def _scores_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "SCORED_AT_ONCE", 16)


def reference(config, path: Path) -> PreTrainedModel:
    """A model of transformers, saved at ``path``. No vector is ones or zeros, one expert is never chosen."""
    torch.set_num_threads(1)
    model = tiny_model(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if name.endswith("gate.weight"):
                tensor[IDLE] = tensor.mean(0)  # never among the best
            if name.endswith("e_score_correction_bias"):
                tensor[IDLE] = -10.0
    model.save_pretrained(path)
    return model


def ours(path: Path, shape: Shape | None = None, **options) -> Decoder:
    decoder = Decoder(shape or shape_of(path), **options)
    with torch.no_grad():
        for tensor in decoder.state_dict().values():
            tensor.fill_(torch.nan)  # what is not loaded will be seen
    folder.load(decoder, path)
    return decoder


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(BYTES, (length,), generator=generator) for length in LENGTHS]


def logits_alone(model: PreTrainedModel) -> torch.Tensor:
    """transformers on each document alone."""
    return torch.cat([model(input_ids=document[None]).logits[0] for document in documents()])


def packed_logits(decoder: Decoder) -> torch.Tensor:
    return decoder.model(torch.cat(documents()), layout(np.array(LENGTHS))) @ decoder.head_weight.T


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logits_and_gradients_equal_transformers(tmp_path: Path, config, recompute: bool) -> None:
    model = reference(config, tmp_path)
    decoder = ours(tmp_path, head_chunk=16)
    keep_less(decoder, "full" if recompute else "none", offloading=False)
    expected_logits = logits_alone(model)
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(decoder), expected_logits, rtol=0, atol=1e-5)

    tokens, starts = torch.cat(documents()), np.cumsum(LENGTHS) - LENGTHS
    chosen = torch.tensor([i for i in range(sum(LENGTHS)) if i not in starts and i % 3])
    logprobs, _ = decoder(
        tokens, layout(np.array(LENGTHS)), chosen - 1, tokens[chosen], torch.full((len(chosen),), 0.7)
    )
    logprobs.mean().backward()
    expected = torch.log_softmax(expected_logits / 0.7, dim=-1)[chosen - 1, tokens[chosen]]
    expected.mean().backward()

    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == {name for name, _ in decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        exact = gradients[name]
        if exact is None:
            assert ".indexer." in name and parameter.grad is None and not parameter.requires_grad
            continue
        assert exact.norm() > 0 and (parameter.grad - exact).norm() <= 1e-4 * exact.norm(), name
        if ".experts." in name:
            assert not exact[IDLE].any() and not parameter.grad[IDLE].any()


def test_the_indexer_really_selects(tmp_path: Path) -> None:
    model = reference(CASES["glm_moe_dsa"], tmp_path)
    shape = shape_of(tmp_path)
    layers = tuple(
        replace(
            layer, attention=replace(layer.attention, indexer=replace(layer.attention.indexer, chosen=2048))
        )
        for layer in shape.layers
    )
    with torch.no_grad():
        expected = logits_alone(model)
        everything = packed_logits(ours(tmp_path, replace(shape, layers=layers)))
    difference = (everything - expected).abs().amax(-1)
    long = torch.cat([torch.arange(length) for length in LENGTHS]) >= model.config.index_topk
    assert (difference[long] > 1e-3).all() and (difference[~long] < 1e-5).all()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_what_is_saved_is_what_transformers_saves(tmp_path: Path, config) -> None:
    reference(config, tmp_path / "theirs")
    decoder = ours(tmp_path / "theirs")
    folder.export(gathered(decoder, torch.float32), tmp_path / "theirs", tmp_path / "ours", "float32")
    theirs, saved = (load_file(tmp_path / name / folder.SINGLE) for name in ("theirs", "ours"))
    assert theirs.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in theirs.items())
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("kind", ["glm4_moe", "minimax_m2"])
def test_the_bias_of_the_choice_is_not_rounded(tmp_path: Path, kind: str) -> None:
    reference(CASES[kind], tmp_path)
    before = load_file(tmp_path / folder.SINGLE)
    tensors = dict(gathered(ours(tmp_path), torch.bfloat16))
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(tensors[name], before[name]) for name in biases)
    assert {t.dtype for name, t in tensors.items() if name not in biases} == {torch.bfloat16}


def test_layers_that_predict_further_ahead_are_passed_over(tmp_path: Path) -> None:
    reference(CASES["glm4_moe"], tmp_path)
    tensors = load_file(tmp_path / folder.SINGLE)
    ahead = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors | ahead, tmp_path / folder.SINGLE)
    ours(tmp_path)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / folder.SINGLE)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.eh_proj\.weight is unexpected"):
        ours(tmp_path)


FAULTS = {
    "qwen3_moe": "model.layers.0.mlp.experts.7.up_proj.weight",
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "glm_moe_dsa": "model.layers.1.self_attn.indexer.wk.weight",
    "minimax_m2": "model.layers.0.block_sparse_moe.experts.3.w2.weight",
}


@pytest.mark.parametrize(("kind", "name"), FAULTS.items(), ids=FAULTS)
def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path, kind: str, name: str) -> None:
    reference(CASES[kind], tmp_path)
    tensors = load_file(tmp_path / folder.SINGLE)
    shape = list(tensors[name].shape)
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / folder.SINGLE)
    with pytest.raises(ModelError, match=f"{name} is missing"):
        ours(tmp_path)
    save_file(tensors | {name: torch.ones(3)}, tmp_path / folder.SINGLE)
    with pytest.raises(ModelError, match=rf"{name} is \[3\], expected \[{shape[0]}"):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("minimax_m2", {"router_jitter_noise": 0.1}, "set router_jitter_noise to 0"),
        ("glm4_moe", {"n_group": 3}, "16 experts do not make 3 groups of two or more; set n_group to 1"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 5}, "cannot go through 5 of 4 experts"),
        ("glm_moe_dsa", {"num_key_value_heads": 2}, "set num_key_value_heads to 4"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "the first must be 'full'"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 4}, "give indexer_types"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "same model in bfloat16"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding attention window"),
    ],
)
def test_what_the_trainer_lacks_is_refused(tmp_path: Path, kind: str, changes: dict, complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[kind].to_dict() | changes))
    with pytest.raises(ModelError, match=complaint):
        shape_of(tmp_path)


def test_older_spelling_of_partial_rotation_is_read(tmp_path: Path) -> None:
    for kind, old in (("glm4_moe", {"partial_rotary_factor": 0.5}), ("minimax_m2", {"rotary_dim": 16})):
        config = CASES[kind].to_dict()
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = shape_of(tmp_path)
        del config["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(config | old | {"rope_theta": 100.0}))
        assert shape_of(tmp_path) == shape and shape.rope.size == 16
