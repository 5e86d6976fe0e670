"""Mixtures of experts sharded over ranks: as one process, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trainer_ranks import OBJECTIVES, Case, outcome, outcomes
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer import checkpoint
from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.step import train_step
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

KINDS = ["qwen3-moe", "glm4-moe", "glm5", "minimax-m2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in paths.items():
        model = tiny_model(tiny_config(kind))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
        model.save_pretrained(path)
    return paths


def test_each_layer_and_its_experts_are_units(mesh, models) -> None:
    decoder = build(models["qwen3-moe"], Trainer(), "bfloat16", mesh)
    units = {name for name, module in decoder.named_modules() if isinstance(module, FSDPModule)}
    layers = {f"model.layers.{number}" for number in range(2)}
    assert units == {""} | layers | {f"{layer}.mlp.experts" for layer in layers}
    assert all(isinstance(parameter, DTensor) for parameter in decoder.parameters())


@pytest.mark.slow
def test_two_ranks_give_the_loss_and_gradients_of_one(mesh, models, tmp_path: Path) -> None:
    cases = [Case(path, "aipo, token", recompute=kind == "glm5") for kind, path in models.items()]
    alone = [outcome(mesh, case) for case in cases]
    for one, two in zip(alone, outcomes(2, cases, tmp_path), strict=True):
        differences = {n: d for n, d in one.differences(two).items() if d == d}  # 0 / 0: an idle expert
        assert len(differences) > 20 and max(differences.values()) <= 1e-5


@pytest.mark.parametrize("kind", ["glm4-moe", "glm5"])
def test_a_checkpoint_holds_frozen_parameters_and_buffers(mesh, models, tmp_path: Path, kind: str) -> None:
    settings = AdamW(learning_rate=1e-2)
    decoder = build(models[kind], Trainer(head_chunk=32), "float32", mesh)
    optimizer = make_optimizer(decoder, settings)
    batch = make_batches(make_samples(4, seed=1), 1, 4096)[0]
    train_step(decoder, optimizer, batch, OBJECTIVES["aipo, token"], rate=1e-2, limit=1.0)
    trained = {name: tensor.clone() for name, tensor in gathered(decoder, torch.float32)}
    saver = checkpoint.Saver("cpu")
    saver.begin(tmp_path, checkpoint.state_of(decoder, optimizer), checkpoint.Progress(), {}, lambda: None)
    saver.settle()

    again = build(models[kind], Trainer(), "float32", mesh)
    with torch.no_grad():
        for tensor in again.state_dict().values():
            tensor.zero_()
    checkpoint.load(tmp_path, again, make_optimizer(again, settings))
    restored = dict(gathered(again, torch.float32))
    assert trained.keys() == restored.keys()
    assert all(torch.equal(tensor, restored[name]) for name, tensor in trained.items())
    assert not torch.equal(trained["lm_head.weight"], tiny_model(tiny_config(kind)).lm_head.weight)


def test_bfloat16_computes_close_to_float32(mesh, models) -> None:
    batch = make_batches(make_samples(8, seed=1), 1, 4096)[0]
    for path in models.values():
        losses = []
        for dtype in ("float32", "bfloat16"):
            decoder = build(path, Trainer(head_chunk=32), dtype, mesh)
            optimizer = make_optimizer(decoder, AdamW())
            step = train_step(decoder, optimizer, batch, OBJECTIVES["supervised"], rate=1e-3, limit=1.0)
            losses.append(step.metrics["loss"])
        assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_sharded_model_is_written_as_transformers_wrote_it(mesh, models, tmp_path: Path) -> None:
    for kind, path in models.items():
        folder.save(gathered(build(path, Trainer(), "float32", mesh), torch.float32), tmp_path / kind)
        mine, theirs = (load_file(p / folder.SINGLE) for p in (tmp_path / kind, path))
        assert mine.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in mine.items())
