"""Hugging Face folders: what we write transformers reads, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import ModelError, shape_of
from stackrl.runtime.trainer.models.sources import initialize


def make(path: Path, tied: bool = False, seed: int = 0) -> Decoder:
    config = tiny_config("qwen3-tied" if tied else "qwen3", architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(path)
    model = Decoder(shape_of(path))
    initialize(model, 0.1, seed)
    return model


def parameters(model: torch.nn.Module):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def same(a: Decoder, b: Decoder) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_in_transformers_and_back(tmp_path: Path, tied: bool) -> None:
    model = make(tmp_path, tied)
    folder.save(parameters(model), tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in parameters(model))
    again = make(tmp_path, tied, seed=1)
    assert not same(again, model)
    folder.load(again, tmp_path)
    assert same(again, model)


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "SHARD_BYTES", 4000)
    model = make(tmp_path)
    folder.save(parameters(model), tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not list(tmp_path.glob(".part-*"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in parameters(model))
    again = make(tmp_path, seed=1)
    folder.load(again, tmp_path)
    assert same(again, model)


def test_a_type_of_less_precision_is_widened(tmp_path: Path) -> None:
    model = make(tmp_path)
    folder.save([(name, p.to(torch.bfloat16)) for name, p in parameters(model)], tmp_path)
    again = make(tmp_path, seed=1)
    folder.load(again, tmp_path)
    assert again.model.norm.weight.dtype == torch.float32
    assert torch.equal(again.head_weight, model.head_weight.bfloat16().float())


def test_a_repeated_tied_head_is_no_fault(tmp_path: Path) -> None:
    model = make(tmp_path, tied=True)
    folder.save([*parameters(model), ("lm_head.weight", model.head_weight.detach().clone())], tmp_path)
    folder.load(make(tmp_path, tied=True, seed=1), tmp_path)


FAULTS = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
    "head missing": (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing"),
    "unexpected": (lambda t: t.update({"model.extra": torch.ones(1)}), r"model\.extra is unexpected"),
    "misshapen": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"model\.norm\.weight is \[3\], expected \[64\]",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), FAULTS.values(), ids=FAULTS)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, change, complaint: str) -> None:
    model = make(tmp_path)
    folder.save(parameters(model), tmp_path)
    tensors = load_file(tmp_path / folder.SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / folder.SINGLE)
    with pytest.raises(ModelError, match=complaint):
        folder.load(model, tmp_path)


def test_a_folder_without_or_with_broken_weights_is_named(tmp_path: Path) -> None:
    model = make(tmp_path)
    with pytest.raises(ModelError, match="no safetensors"):
        folder.load(model, tmp_path)
    (tmp_path / folder.SINGLE).write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match="cannot be read"):
        folder.load(model, tmp_path)


def test_an_export_replaces_the_whole_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "final"
    source.mkdir()
    model = make(source)
    folder.save(parameters(model), source)
    (source / "tokenizer.json").write_text("{}")
    target.mkdir()
    (target / "old").touch()
    folder.export([(n, p.to(torch.bfloat16)) for n, p in parameters(model)], source, target, "bfloat16")
    assert {file.name for file in target.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["final", "model"]


def test_a_failed_export_leaves_the_old_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "final"
    source.mkdir()
    model = make(source)
    target.mkdir()
    (target / "old").touch()

    def breaks():
        yield parameters(model)[0]
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        folder.export(breaks(), source, target, "float32")
    assert [file.name for file in target.iterdir()] == ["old"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["final", "model"]
