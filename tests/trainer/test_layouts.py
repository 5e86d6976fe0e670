"""However the ranks divide the work, three optimizer steps are those of a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layout_ranks import Case, outcome, outcomes
from tiny_models import tiny_config, tiny_model

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.optimizers import Muon

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
KINDS = {"dense": "qwen3", "mixture": "qwen3-moe", "latent": "glm5"}
TWO = [Degrees(2, shard=2), Degrees(2, replicate=2), Degrees(2, context=2)]
TWO_EXPERT = [Degrees(2, shard=2, expert=2), Degrees(2, context=2, expert=2)]
FOUR = [
    Degrees(4, replicate=2, shard=2),
    Degrees(4, shard=2, context=2),
    Degrees(4, replicate=2, context=2),
    Degrees(4, context=4),
]
FOUR_EXPERT = [
    Degrees(4, shard=4, expert=2),
    Degrees(4, shard=4, expert=4),
    Degrees(4, replicate=2, shard=2, expert=2),
    Degrees(4, shard=2, context=2, expert=2),
    Degrees(4, shard=2, context=2, expert=4),
    Degrees(4, context=4, expert=2),
    Degrees(4, replicate=2, context=2, expert=2),
]
MUON = Muon(type="muon", learning_rate=1e-3, epsilon=1e-6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, kind in KINDS.items():
        model = tiny_model(tiny_config(kind))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in KINDS}


def compare(mesh: Meshes, cases: list[Case], folder: Path) -> None:
    """Each case as the same work of this process alone."""
    alone: dict[str, object] = {}
    far = {}
    for case, several in zip(cases, outcomes(cases[0].degrees.ranks, cases, folder), strict=True):
        single = replace(case, degrees=Degrees(1))
        key = repr(single)
        if key not in alone:
            alone[key] = outcome(mesh, single)
        difference, where = alone[key].furthest(several)
        if not difference <= TOLERANCE:
            far[str(case)] = (difference, where)
        if case.degrees.ranks == case.degrees.context and case.capacity > 1000:  # the whole batch is rank 0's
            for one, other in zip(alone[key].logprobs, several.logprobs, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert not far


def test_two_ranks(mesh: Meshes, models: dict[str, Path], tmp_path: Path) -> None:
    compare(
        mesh, [Case(models["dense"], TWO[1]), *_products(models, Degrees(2, context=2, expert=2))], tmp_path
    )


@pytest.mark.nightly
def test_every_division_over_two_ranks(mesh: Meshes, models: dict[str, Path], tmp_path: Path) -> None:
    cases = [Case(models["dense"], degrees) for degrees in TWO]
    cases += [Case(models[name], d) for name in ("mixture", "latent") for d in [*TWO, *TWO_EXPERT]]
    cases += _products(models, Degrees(2, shard=2, expert=2))
    compare(mesh, cases, tmp_path)


@pytest.mark.nightly  # two of these divisions are those of the ranks that go on from a checkpoint
def test_four_ranks(mesh: Meshes, models: dict[str, Path], tmp_path: Path) -> None:
    cases = [
        Case(models["dense"], FOUR[0]),
        Case(models["dense"], FOUR[3]),
        Case(models["mixture"], Degrees(4, shard=2, context=2, expert=4)),
        Case(models["latent"], Degrees(4, replicate=2, context=2, expert=2), {"lora": {"rank": 4}}),
        Case(models["latent"], Degrees(4, shard=4, expert=2), optimizer=MUON),
    ]
    compare(mesh, cases, tmp_path)


def test_a_checkpoint_goes_on_under_any_other_division(
    mesh: Meshes, models: dict[str, Path], tmp_path: Path
) -> None:
    """Written by two ranks that share experts and micro-batches; read by one, and by four."""
    saved = {name: tmp_path / name for name in ("mixture", "latent")}
    sharing = Degrees(2, context=2, expert=2)
    cases = [
        Case(models["mixture"], sharing, save=saved["mixture"]),
        Case(models["latent"], sharing, optimizer=MUON, save=saved["latent"]),
    ]
    unbroken = outcomes(2, cases, tmp_path)
    four = [Degrees(4, shard=4, expert=2), Degrees(4, replicate=2, context=2, expert=2)]
    on_four = outcomes(
        4,
        [
            replace(case, degrees=degrees, save=None, resume=case.save)
            for case, degrees in zip(cases, four, strict=True)
        ],
        tmp_path,
    )
    for case, whole, several in zip(cases, unbroken, on_four, strict=True):
        last = replace(whole, losses=whole.losses[-1:], norms=whole.norms[-1:])
        alone = outcome(mesh, replace(case, degrees=Degrees(1), save=None, resume=case.save))
        assert last.furthest(alone)[0] <= TOLERANCE
        assert last.furthest(several)[0] <= TOLERANCE


@pytest.mark.nightly
def test_every_division_over_four_ranks(mesh: Meshes, models: dict[str, Path], tmp_path: Path) -> None:
    cases = [Case(models["dense"], degrees) for degrees in FOUR]
    cases += [Case(models[name], d) for name in ("mixture", "latent") for d in [*FOUR, *FOUR_EXPERT]]
    cases += _products(models, Degrees(4, shard=2, context=2, expert=2))
    compare(mesh, cases, tmp_path)


def _products(models: dict[str, Path], degrees: Degrees) -> list[Case]:
    """Every other thing that changes how a step is computed, together with ``degrees``."""
    return [
        Case(models["mixture"], degrees, {"lora": {"rank": 4}}),
        Case(models["latent"], degrees, {"lora": {"rank": 4}}),
        Case(models["mixture"], degrees, optimizer=MUON),
        Case(models["latent"], degrees, optimizer=MUON),
        Case(models["mixture"], degrees, {"activation_checkpointing": "full"}),
        Case(models["latent"], degrees, {"activation_checkpointing": "full"}),
        Case(models["mixture"], degrees, capacity=60),
        Case(models["latent"], degrees, capacity=60),
        Case(models["latent"], degrees, {"reshard_after_forward": False}, capacity=41, samples=3),
    ]
