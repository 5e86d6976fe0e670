"""Every loss in a whole step: the formula over all sequences, however the step is cut and dealt to ranks."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import loss_formulas as formulas
import msgspec
import numpy as np
import pytest
import torch
from pair_model import MAX_TOKENS, by_formula, mixed_samples, step, steps

from stackrl.runtime.trainer import losses
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.step import Objective
from stackrl.runtime.transport.messages import CE, REF_KL, RL, Sample
from stackrl.schemas import losses as language

TOLERANCE = 1e-6
"""Weights of tokens are float32."""
LOSSES: dict[str, tuple[language.Loss, formulas.Formula]] = {
    "aipo": (language.AipoLoss(), formulas.aipo),
    "grpo": (language.GrpoLoss(type="grpo", dual_clip=3.0), partial(formulas.grpo, dual=3.0)),
    "dapo": (language.DapoLoss(type="dapo"), partial(formulas.grpo, high=0.28)),
    "dr_grpo": (language.DrGrpoLoss(type="dr_grpo"), formulas.grpo),
    "gspo": (
        language.GspoLoss(type="gspo", clip_low=0.5, clip_high=2.0),
        partial(formulas.gspo, low=0.5, high=2.0),
    ),
    "gspo, token": (
        language.GspoLoss(type="gspo", clip_low=0.5, clip_high=2.0, normalize="token"),
        partial(formulas.gspo, low=0.5, high=2.0),
    ),
    "gmpo": (language.GmpoLoss(type="gmpo"), formulas.gmpo),
    "cispo": (language.CispoLoss(type="cispo"), formulas.cispo),
    "decoupled_ppo": (
        language.DecoupledPpoLoss(
            type="decoupled_ppo",
            proximal="approximated",
            correction=language.ProximalCorrection(level="sequence", high=3.0),
        ),
        partial(formulas.decoupled_ppo, approximated=True, level="sequence", cap=3.0),
    ),
    "dppo": (language.DppoLoss(type="dppo"), formulas.dppo),
    "ipo": (language.IpoLoss(type="ipo"), formulas.ipo),
    "icepop": (language.IcepopLoss(type="icepop"), formulas.icepop),
    "topr": (language.ToprLoss(type="topr"), formulas.topr),
    "sapo": (language.SapoLoss(type="sapo"), formulas.sapo),
    "reinforce": (
        language.ReinforceLoss(type="reinforce", correction=language.Correction(level="geometric")),
        partial(formulas.reinforce, level="geometric"),
    ),
}
SAMPLES = mixed_samples(40, seed=5)


def objective(name: str) -> Objective:
    chosen, _ = LOSSES[name]
    return Objective(losses.make(chosen), chosen.normalize, MAX_TOKENS)


def equal(one: tuple[dict[str, float], torch.Tensor], other: tuple[dict[str, float], torch.Tensor]) -> None:
    for name in ("loss", "loss_ce", "loss_ref_kl", "capped", "mismatch_kl", "reference_kl", "entropy"):
        assert one[0][name] == pytest.approx(other[0][name], rel=TOLERANCE), name
    assert float((one[1] - other[1]).norm() / one[1].norm()) < TOLERANCE


def test_the_samples_have_tokens_of_every_component() -> None:
    marks = {(mark in s.loss_mask) and mark for s in SAMPLES for mark in (RL, CE, REF_KL)}
    assert {RL, CE, REF_KL} <= marks
    assert any({RL, CE} <= set(s.loss_mask.tolist()) for s in SAMPLES)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_the_formula_with_each_component_over_its_own_tokens(mesh: Meshes, name: str) -> None:
    chosen, formula = LOSSES[name]
    total, gradient = by_formula(formula, chosen.normalize, SAMPLES)
    metrics, found = step(objective(name), SAMPLES)
    assert metrics["loss"] == pytest.approx(total, rel=TOLERANCE)
    assert float((gradient - found).norm() / gradient.norm()) < TOLERANCE


@pytest.mark.parametrize("name", LOSSES)
def test_how_a_step_is_cut_and_ordered_does_not_matter(mesh: Meshes, name: str) -> None:
    whole = step(objective(name), SAMPLES)
    for capacity in (40, 64, 200):
        equal(whole, step(objective(name), SAMPLES, capacity))
    shuffled = list(SAMPLES)
    random.Random(0).shuffle(shuffled)
    equal(whole, step(objective(name), shuffled))


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_in_masked_places_does_not_matter(mesh: Meshes, name: str) -> None:
    clean = step(objective(name), SAMPLES, 200)
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = [_poisoned(sample, poison) for sample in SAMPLES]
        silent = [
            msgspec.structs.replace(sample, loss_mask=np.zeros_like(sample.loss_mask), advantage=1e30)
            for sample in poisoned[:3]
        ]
        equal(clean, step(objective(name), [*poisoned[:9], *silent, *poisoned[9:]], 200))


def _poisoned(sample: Sample, poison: float) -> Sample:
    engine = np.where(np.isin(sample.loss_mask, (RL, REF_KL)), sample.logprobs, poison).astype("<f4")
    reference = np.where(np.isin(sample.loss_mask, (RL, REF_KL)), sample.reference, poison).astype("<f4")
    return msgspec.structs.replace(sample, logprobs=engine, reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["data parallel", "context parallel"])
def test_two_ranks_do_as_one(mesh: Meshes, tmp_path: Path, shared: bool) -> None:
    several = steps(2, shared, {name: objective(name) for name in LOSSES}, SAMPLES, tmp_path)
    for name, found in several.items():
        equal(step(objective(name), SAMPLES), found)
