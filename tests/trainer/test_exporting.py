"""Checkpoints as Hugging Face folders: to the bit what was saved, whoever saved it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import Weights, saved, saved_by_two
from fake_roles import stack, task_file
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, MistralConfig

from stackrl.cli import main
from stackrl.runtime import checkpoints
from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.run import RunFolder, create_run
from stackrl.runtime.trainer import exporting
from stackrl.runtime.trainer.checkpoint import PARTIAL
from stackrl.runtime.trainer.ledger import PART
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.names import FLOAT32
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.lora import Lora
from stackrl.schemas.trainer import Trainer

ADAPTERS = Trainer(head_chunk=32, lora=Lora(rank=8))
PLAIN = Trainer(head_chunk=32)
CASES = {
    "qwen3-tied": (PLAIN, Degrees(2, shard=2)),
    "qwen3-moe": (PLAIN, Degrees(2, shard=2, expert=2)),
    "minimax-m2": (ADAPTERS, Degrees(2, shard=2)),
    "mistral": (PLAIN, Degrees(2, shard=2)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in CASES}
    for kind, path in paths.items():
        shape = tiny_config("llama").to_dict()
        config = MistralConfig(**shape | {"model_type": kind}) if kind == "mistral" else tiny_config(kind)
        tiny_model(config).save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")
        (path / "pytorch_model.bin").write_text("the first weights, in another format")
    return paths


@pytest.fixture(scope="module")
def of_one(mesh, models, tmp_path_factory) -> tuple[Path, dict[str, Weights]]:
    """Checkpoints of one rank by their models' names, and what they hold."""
    path = tmp_path_factory.mktemp("of-one")
    return path, {kind: saved(mesh, models[kind], CASES[kind][0], path / kind) for kind in CASES}


@pytest.fixture(scope="module")
def of_two(models, tmp_path_factory) -> tuple[Path, dict[str, Weights]]:
    path = tmp_path_factory.mktemp("of-two")
    return path, saved_by_two({kind: (models[kind], *case) for kind, case in CASES.items()}, path)


def export(checkpoint: Path, source: Path, target: Path, dtype: str = "float32", lora: Lora | None = None):
    exporting.export(checkpoint, source, target, dtype, lora)
    return load_file(target / folder.SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["of_one", "of_two"])
def test_an_export_is_to_the_bit_what_was_saved(mesh, models, request, tmp_path: Path, ranks: str) -> None:
    saved_at, weights = request.getfixturevalue(ranks)
    for kind, (settings, _) in CASES.items():
        target = tmp_path / kind
        tensors = export(saved_at / kind, models[kind], target, lora=settings.lora)
        assert tensors.keys() == weights[kind].keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[kind][name]), (kind, name)
        first = load_file(models[kind] / folder.SINGLE)
        assert not all(torch.equal(tensor, first[name]) for name, tensor in tensors.items())

        again = dict(gathered(build(target, PLAIN, "float32", mesh), torch.float32))
        assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
        _, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert {file.name for file in target.iterdir()} == {
            *(file.name for file in models[kind].iterdir() if file.suffix != ".bin")
        }


def test_the_dtype_is_that_which_is_asked_for_but_for_what_must_not_be_rounded(
    of_one, models, tmp_path: Path
) -> None:
    saved_at, weights = of_one
    tensors = export(
        saved_at / "minimax-m2", models["minimax-m2"], tmp_path / "new", "bfloat16", ADAPTERS.lora
    )
    for name, tensor in tensors.items():
        kept = name.endswith(FLOAT32)
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(tensor, weights["minimax-m2"][name].to(tensor.dtype))
    assert json.loads((tmp_path / "new/config.json").read_text())["dtype"] == "bfloat16"


def test_one_tensor_is_read_at_a_time(of_one, models, tmp_path: Path, monkeypatch) -> None:
    """The files before are on disk when the next is read, and no tensor is read twice."""
    read, seen = exporting._Reader.read, []

    def watched(reader, name: str):
        seen.append((name, len(list(tmp_path.rglob(".part-*")))))
        return read(reader, name)

    monkeypatch.setattr(exporting._Reader, "read", watched)
    monkeypatch.setattr(folder, "SHARD_BYTES", 100_000)
    saved_at, weights = of_one
    exporting.export(saved_at / "qwen3-moe", models["qwen3-moe"], tmp_path / "new", "float32", None)
    names, parts = zip(*seen, strict=True)
    assert len(set(names)) == len(names) and parts[0] == 0 and parts[-1] > 5
    files = list((tmp_path / "new").glob("model-*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 5 and tensors.keys() == weights["qwen3-moe"].keys()
    assert all(torch.equal(tensor, weights["qwen3-moe"][name]) for name, tensor in tensors.items())


def test_weights_of_another_model_are_named(of_one, models, tmp_path: Path) -> None:
    saved_at, _ = of_one
    complaint = "not those of the run's model: .*lm_head.weight is missing"
    with pytest.raises(CheckpointError, match=complaint):
        export(saved_at / "qwen3-tied", models["qwen3-moe"], tmp_path / "new")
    wider = shutil.copytree(models["qwen3-tied"], tmp_path / "wider")
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    with pytest.raises(CheckpointError, match=r"up_proj.weight is \[160, 64\], expected \[200, 64\]"):
        export(saved_at / "qwen3-tied", wider, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_leaves_nothing_behind(of_one, models, tmp_path: Path) -> None:
    saved_at, _ = of_one
    copy = shutil.copytree(saved_at / "qwen3-tied", tmp_path / "copy")
    (data,) = (copy / "trainer").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"cannot be read from {copy}/trainer"):
        export(copy, models["qwen3-tied"], tmp_path / "new")
    (copy / "trainer/.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{copy}/trainer cannot be read"):
        export(copy, models["qwen3-tied"], tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


@pytest.fixture
def run(of_one, models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with a checkpoint at step 10, and one at step 20 whose writing was cut short."""
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run = create_run("fake", task_file(tmp_path), "hash", stack(), {})
    shutil.copytree(models["qwen3-tied"], run.model)
    for index, part in ((10, PART), (20, PARTIAL)):
        checkpoint = checkpoints.folder(run.checkpoints(run.stack()), index)
        shutil.copytree(of_one[0] / "qwen3-tied" / PART, checkpoint / part)
    checkpoints.write_manifest(checkpoints.folder(run.checkpoints(run.stack()), 10), {"index": 10})
    return run


def test_the_verb_exports_the_newest_checkpoint_that_is_whole(run: RunFolder, of_one, capsys) -> None:
    assert main(["export", run.id]) == 0
    out, err = capsys.readouterr()
    target = run.path / "exports/step-000010"
    assert out == f"{target}\n" and "in float32" in err
    tensors = load_file(target / folder.SINGLE)
    assert all(torch.equal(tensor, of_one[1]["qwen3-tied"][name]) for name, tensor in tensors.items())

    assert main(["export", f"{run.id}@10", "mine", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == "mine\n"
    assert {tensor.dtype for tensor in load_file(Path("mine") / folder.SINGLE).values()} == {torch.bfloat16}
    assert main(["export", "latest", "mine", "--force"]) == 0
    assert {tensor.dtype for tensor in load_file(Path("mine") / folder.SINGLE).values()} == {torch.float32}


def test_the_verb_says_what_to_type_instead(run: RunFolder, tmp_path: Path, capsys) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("precious")
    (tmp_path / "file").write_text("")
    shutil.copytree(run.model, tmp_path / "model")
    shown = f"`stackrl export {run.id}@10`"
    for arguments, words in (
        (["nobody"], "no run is called 'nobody'"),
        ([f"{run.id}@20"], f"has no checkpoint of step 20; there are 10: {shown}"),
        ([f"{run.id}@ten"], f"'ten' is not a step of run {run.id}; there are 10: {shown}"),
        ([run.id, "model"], "model is there already; add --force"),
        ([run.id, "notes", "--force"], "notes holds something else than a model"),
        ([run.id, "file", "--force"], "file is a file"),
        ([run.id, str(run.model), "--force"], "belongs to the run itself"),
    ):
        assert main(["export", *arguments]) == 2
        out, err = capsys.readouterr()
        assert not out and words in err and "Traceback" not in err
    data = next((run.path / "checkpoints/step-000010/trainer").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert main(["export", f"{run.id}@10"]) == 2
    assert f"{data} is damaged" in capsys.readouterr().err
    shutil.rmtree(run.model)
    assert main(["export", run.id]) == 2
    assert f"no checkpoint of run {run.id} can be used" in capsys.readouterr().err
    assert {entry.name for entry in tmp_path.iterdir()} >= {"notes", "model"}
    assert not (run.path / "exports").exists() and [f.name for f in Path("notes").iterdir()] == ["mine.txt"]


def test_a_model_folder_that_is_gone_is_named(run: RunFolder, capsys) -> None:
    shutil.rmtree(run.model)
    assert main(["export", run.id]) == 2
    assert f"run {run.id} has lost its model folder" in capsys.readouterr().err
