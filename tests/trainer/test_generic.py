"""Models of transformers without a family of ours: the same numbers, packed as alone, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import BYTES, tiny_config, tiny_model
from trainer_ranks import OBJECTIVES, Case, outcome, outcomes
from trainer_runs import make_batches, make_samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.generic import Generic
from stackrl.runtime.trainer.models.model import model_of
from stackrl.runtime.trainer.models.shape import ModelError
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.step import train_step
from stackrl.schemas.activations import SelectiveCheckpointing
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.lora import Lora
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

LENGTHS = [9, 30, 2, 70, 17, 1]
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
    "eos_token_id",
    "pad_token_id",
)
FAMILIES = {
    "mistral": {"sliding_window": 16},
    "olmo2": {},
    "phi3": {"sliding_window": 16, "pad_token_id": None},
    # a head that is the embedding, embeddings that are scaled, windows in some layers
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"logit_scale": 0.25},
    # attention scores that are capped, which fused attention would leave out
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": 2.0, "sliding_window": 16},
    "gpt2": {"n_positions": 512, "n_inner": 160},
}


def config_of(family: str) -> PreTrainedConfig:
    shape = tiny_config("llama").to_dict()
    return CONFIG_MAPPING[family](**{name: shape[name] for name in SHAPE} | FAMILIES.get(family, {}))


def reference(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of transformers, saved at ``path``. No vector is ones or zeros."""
    torch.set_num_threads(1)
    model = tiny_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation("eager")
    model.save_pretrained(path)
    return model


def ours(path: Path) -> Generic:
    with torch.device("meta"):
        model = model_of(path, head_chunk=16)
    model.to_empty(device="cpu")
    folder.load(model, path)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {family: (path, reference(path, config_of(family))) for family, path in paths.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(models, family: str) -> None:
    """Of packed documents, those of each alone."""
    path, exact = models[family]
    model = ours(path)
    assert isinstance(model, Generic)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(BYTES, (length,), generator=generator) for length in LENGTHS]
    tokens, starts = torch.cat(documents), np.cumsum(LENGTHS) - LENGTHS
    logits = torch.cat([exact(input_ids=document[None]).logits[0] for document in documents])
    chosen = torch.tensor([i for i in range(sum(LENGTHS)) if i not in starts and i % 3])
    temperatures = torch.full((len(chosen),), 0.7)
    expected = torch.log_softmax(logits / 0.7, dim=-1)[chosen - 1, tokens[chosen]]
    logprobs, _ = model(tokens, layout(np.array(LENGTHS)), chosen - 1, tokens[chosen], temperatures)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)

    exact.zero_grad()
    expected.mean().backward()
    logprobs.mean().backward()
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert gradients[name].norm() > 0
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoders_layers_are_found(models, family: str) -> None:
    path, exact = models[family]
    model = ours(path)
    assert len(model.layers) == exact.config.num_hidden_layers
    assert not any(parameter.shape[0] == 264 for parameter in model.layers.parameters())


def test_what_no_file_holds_is_computed(models) -> None:
    path, exact = models["gemma3_text"]
    with torch.device("meta"):
        model = model_of(path)
    model.to_empty(device="cpu")
    buffers = dict(exact.named_buffers())
    assert len(buffers) >= 4
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.slow
def test_two_ranks_give_the_loss_and_gradients_of_one(mesh, models, tmp_path: Path) -> None:
    cases = [
        Case(models["mistral"][0], "aipo, token", samples=8, recompute=True),
        Case(models["gemma3_text"][0], "grpo, sequence", samples=8),
    ]
    alone = [outcome(mesh, case) for case in cases]
    for one, two in zip(alone, outcomes(2, cases, tmp_path), strict=True):
        assert max(one.differences(two).values()) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"activation_offloading": True},
        {"activation_checkpointing": "full", "activation_offloading": True},
    ],
)
def test_keeping_less_changes_nothing(mesh, models, options: dict[str, object]) -> None:
    batch = make_batches(make_samples(8, seed=1), 1, 4096)[0]
    steps = []
    for settings in (Trainer(head_chunk=32), Trainer(head_chunk=32, **options)):
        model = build(models["mistral"][0], settings, "float32", mesh)
        optimizer = make_optimizer(model, AdamW())
        steps.append(train_step(model, optimizer, batch, OBJECTIVES["supervised"], rate=1e-3, limit=1.0))
    assert steps[0].metrics == pytest.approx(steps[1].metrics, rel=1e-5)


def test_what_is_trained_is_saved_and_loaded_by_transformers(mesh, models, tmp_path: Path) -> None:
    for family in ("mistral", "gemma3_text"):
        path, _ = models[family]
        settings = Trainer(head_chunk=32, lora=Lora(rank=4) if family == "mistral" else None)
        model = build(path, settings, "bfloat16", mesh)
        optimizer = make_optimizer(model, AdamW(learning_rate=1e-2))
        batch = make_batches(make_samples(8, seed=1), 1, 4096)[0]
        step = train_step(model, optimizer, batch, OBJECTIVES["supervised"], rate=1e-2, limit=1.0)
        assert step.metrics["weights_finite"] and not step.metrics["skipped"]
        folder.export(gathered(model, torch.float32), path, tmp_path / family, "float32")
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        before, after = load_file(path / folder.SINGLE), dict(gathered(model, torch.float32))
        assert before.keys() == after.keys()
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, after[name])
        assert not all(torch.equal(tensor, after[name]) for name, tensor in before.items())


REFUSED = {
    "vaultgemma": r"vaultgemma models cannot be trained: its logits are .* \(final_logit_softcapping 30",
    "phi": "phi models cannot be trained: its head has a bias",
    "mixtral": "mixtral models cannot be trained: its tensors have other names or shapes in memory",
    "gpt_oss": "gpt_oss models cannot be trained: it is a mixture of experts",
    "bloom": "bloom models cannot be trained: it takes no positions",
    "t5": r"neither the trainer nor transformers .* has a causal language model 't5'",
}


@pytest.mark.parametrize(("family", "complaint"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_done_exactly_is_refused_by_name(tmp_path: Path, family: str, complaint: str) -> None:
    config_of(family).save_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(ModelError, match=complaint):
        model_of(tmp_path)


def test_an_architecture_that_nobody_knows_is_named(models, tmp_path: Path) -> None:
    shutil.copytree(models["mistral"][0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen9"}))
    with pytest.raises(ModelError, match=r"language model 'qwen9' .*; the trainer has llama, qwen3"):
        model_of(tmp_path)
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json does not say .*: it lacks 'model_type'"):
        model_of(tmp_path)


def test_a_tensor_that_does_not_fit_is_named(mesh, models, tmp_path: Path) -> None:
    shutil.copytree(models["mistral"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / folder.SINGLE)
    missing = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = missing.clone()
    save_file(tensors, tmp_path / folder.SINGLE)
    complaint = r"model\.layers\.1\.mlp\.up_proj\.weight is missing; model\.norm\.weight is \[160, 64\]"
    with pytest.raises(ModelError, match=complaint):
        build(tmp_path, Trainer(), "float32", mesh)


@pytest.mark.parametrize("name", ["context", "expert"])
def test_ranks_cannot_share_contexts_or_experts(mesh: Meshes, models, name: str) -> None:
    meshes = Meshes(Degrees(2, **{name: 2}), mesh.dense, mesh.expert, mesh.beside, mesh.context)
    with pytest.raises(ModelError, match=f"trainer.parallel.{name} is 2, but mistral models"):
        build(models["mistral"][0], Trainer(), "float32", meshes)


def test_parts_of_foreign_layers_cannot_be_named(mesh: Meshes, models) -> None:
    settings = Trainer(activation_checkpointing=SelectiveCheckpointing(type="selective", parts=["mlp"]))
    with pytest.raises(ModelError, match="say full or none"):
        build(models["mistral"][0], settings, "float32", mesh)


def test_documents_that_would_see_each_other_are_noticed(mesh: Meshes, models, monkeypatch) -> None:
    """As in a family whose attention does not heed positions."""
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    for family, (path, _) in models.items():
        for dtype in ("float32", "bfloat16"):
            with pytest.raises(ModelError, match=f"{family} models cannot be trained on packed documents"):
                build(path, Trainer(), dtype, mesh)
