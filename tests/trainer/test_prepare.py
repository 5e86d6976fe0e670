"""The first weights of a run: made, linked, or refused with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import TINY, make_run, make_stack
from transformers import AutoModelForCausalLM, AutoTokenizer

from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.models.families import ModelError
from stackrl.runtime.trainer.models.prepare import prepare


def prepared(path: Path, model: dict, **stack) -> RunFolder:
    run = make_run(path, make_stack(model=model, **stack))
    prepare(run)
    return run


def random(**config) -> dict:
    return {"init": "random", "architecture": "qwen3", "config": TINY | config}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_random_model_is_what_transformers_expects(tmp_path: Path, architecture: str, tied: bool) -> None:
    source = random(tie_word_embeddings=tied) | {"architecture": architecture, "dtype": "bfloat16"}
    run = prepared(tmp_path, source)
    model, report = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == 264 and model.dtype == torch.bfloat16
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(run.model).eos_token_id
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.norm.weight.eq(1).all()


MIXTURE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2}
GLM = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
}
MIXTURES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16},
    "glm4_moe": GLM | {"n_group": 2, "topk_group": 1, "num_key_value_heads": 2, "use_qk_norm": True},
    "glm_moe_dsa": GLM | LATENT,
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_random_mixture_is_what_transformers_expects(tmp_path: Path, architecture: str) -> None:
    source = {"init": "random", "architecture": architecture, "dtype": "bfloat16"}
    run = prepared(tmp_path, source | {"config": MIXTURE | MIXTURES[architecture]})
    model, report = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == 264
    matrices = model.model.layers[1].mlp.experts
    for matrix in (matrices.gate_up_proj, matrices.down_proj):
        assert matrix.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert model(input_ids=torch.arange(20)[None]).logits.isfinite().all()


def test_the_tokenizer_has_a_token_for_every_byte_marker_and_role(tmp_path: Path) -> None:
    run = prepared(tmp_path, random())
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    text = "Grüße, 世界 🙂\n\ttab  two spaces"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "abc"}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tokenizer.decode(chat) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(chat) == 3 * len(["<|im_start|>", "role", "\n"]) + 2 * len(["<|im_end|>", "\n"]) + 4
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert len(tokenizer) <= 264


def weights(run: RunFolder) -> torch.Tensor:
    return load_file(run.model / "model.safetensors")["model.embed_tokens.weight"]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    runs = [prepared(tmp_path / str(i), random(), seed=seed) for i, seed in enumerate([3, 3, 4])]
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert not torch.equal(weights(runs[0]), weights(runs[2]))


def test_a_folder_is_linked_and_a_second_start_changes_nothing(tmp_path: Path) -> None:
    source = prepared(tmp_path / "a", random())
    run = prepared(tmp_path / "b", {"id": str(source.model), "dtype": "float32"})
    assert torch.equal(weights(run), weights(source))
    assert (run.model / "model.safetensors").is_symlink()
    AutoTokenizer.from_pretrained(run.model)
    before = (run.model / "config.json").lstat().st_mtime_ns
    prepare(run)
    assert (run.model / "config.json").lstat().st_mtime_ns == before


def remove(name: str):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (remove("config.json"), "config.json"),
        (remove("model.safetensors"), "no safetensors"),
        (remove("chat_template.jinja"), "no chat template"),
        (remove("tokenizer.json"), "no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_refused_and_leaves_nothing(tmp_path: Path, damage, complaint: str) -> None:
    source = prepared(tmp_path / "a", random())
    damage(source.model)
    with pytest.raises(ModelError, match=complaint):
        prepared(tmp_path / "b", {"id": str(source.model)})
    assert not (tmp_path / "b" / "model").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    source = prepared(tmp_path / "a", random())
    tokenizer = AutoTokenizer.from_pretrained(source.model)
    tokenizer.add_tokens(["<call>", "<answer>"])
    tokenizer.save_pretrained(source.model)
    last = max(tokenizer.get_vocab().values())
    assert last < 264
    prepared(tmp_path / "fewer", {"id": str(source.model)})
    tokenizer.add_tokens([f"<more-{number}>" for number in range(264 - last)])
    tokenizer.save_pretrained(source.model)
    complaint = f"'<more-{263 - last}>' with the number 264, .* has rows for 264 .*embeddings\\(265\\)"
    with pytest.raises(ModelError, match=complaint):
        prepared(tmp_path / "b", {"id": str(source.model)})
    assert not (tmp_path / "b" / "model").exists()


def test_a_family_of_transformers_alone_is_linked_too(tmp_path: Path) -> None:
    source = prepared(tmp_path / "a", random())
    config = json.loads((source.model / "config.json").read_text())
    (source.model / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    prepared(tmp_path / "b", {"id": str(source.model)})
    (source.model / "config.json").write_text(json.dumps(config | {"model_type": "qwen9"}))
    with pytest.raises(ModelError, match=r"neither the trainer nor transformers .* language model 'qwen9'"):
        prepared(tmp_path / "c", {"id": str(source.model)})


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"id": "./nowhere"}, "neither a folder nor a name on the hub"),
        ({"id": "a/b/c"}, "neither a folder nor a name on the hub"),
        (random(num_experts=8), "model.config.num_experts is no key of qwen3 models"),
        ({"init": "package", "package": "no-such-package", "file": "x.gguf"}, "pip install"),
        ({"init": "package", "package": "torch", "file": "x.gguf"}, "torch does not ship 'x.gguf'"),
        (
            random(num_attention_heads=3, num_key_value_heads=2),
            "3 is not a multiple of num_key_value_heads 2",
        ),
    ],
)
def test_a_source_that_is_not_there_is_refused_with_what_to_do(
    tmp_path: Path, source: dict, complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        prepared(tmp_path, source)


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"no-owner/no-model could not be downloaded(.|\n)*local folder"):
        prepared(tmp_path / "run", {"id": "no-owner/no-model"})


@pytest.mark.slow
def test_the_program_ends_with_one_line_for_people(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_stack(model={"id": "./nowhere"}))
    command = [sys.executable, "-m", "stackrl.runtime.trainer.models.prepare", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model.id './nowhere'")
