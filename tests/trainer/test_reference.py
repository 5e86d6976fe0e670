"""The reference that the trainer keeps: what the first weights say, whatever becomes of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_model
from trainer_ranks import Case, outcome, outcomes
from trainer_runs import make_batches, make_samples, make_stack

from stackrl.runtime.trainer import lora, losses
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.prepared import prepare
from stackrl.runtime.trainer.reference import FrozenCopy, WithoutAdapters, make_reference
from stackrl.runtime.trainer.routing import routers
from stackrl.runtime.trainer.step import Objective, train_step
from stackrl.runtime.transport.messages import REF_KL, Batch
from stackrl.schemas.comparison import trainer_keeps_reference
from stackrl.schemas.losses import AipoLoss, Divergence
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

KL = Objective(losses.make(AipoLoss(kl=Divergence(coefficient=0.5))), "token", 16, refers=True)


def batch_of(seed: int, **changes: Any) -> Batch:
    samples = [msgspec.structs.replace(sample, **changes) for sample in make_samples(8, seed)]
    return make_batches(samples)[0]


def said(decoder: torch.nn.Module, batch: Batch) -> torch.Tensor:
    micro = prepare(batch.micro_batches[0], torch.device("cpu"))
    with torch.no_grad():
        return decoder(micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures)[0]


@pytest.mark.parametrize("adapters", [None, {"rank": 4}], ids=["full", "lora"])
def test_it_says_what_the_first_weights_said(
    model: Path, mesh: Meshes, adapters: dict[str, int] | None
) -> None:
    settings = Trainer(lora=adapters, activation_checkpointing="full")
    decoder = build(model, settings, "float32", mesh)
    reference = make_reference(decoder, model, settings, "float32", mesh)
    assert isinstance(reference, WithoutAdapters if adapters else FrozenCopy)
    look = batch_of(9)
    first = said(decoder, look)
    optimizer = make_optimizer(decoder, AdamW())
    for seed in range(3):
        step = train_step(decoder, optimizer, batch_of(seed), KL, rate=1e-2, limit=1.0, reference=reference)
        # before the first step the model is its own reference, and only then
        assert step.metrics["reference_kl"] == pytest.approx(0, abs=1e-9) if seed == 0 else 1e-4
        assert seed == 0 or step.metrics["reference_kl"] > 1e-4
    prepared = prepare(look.micro_batches[0], torch.device("cpu"))
    assert not torch.allclose(said(decoder, look), first, atol=1e-2)
    torch.testing.assert_close(reference.logprobs(prepared), first, rtol=0, atol=1e-5)
    assert decoder.training
    if adapters:
        changed = said(decoder, look)
        with lora.silent(decoder):
            torch.testing.assert_close(said(decoder, look), first, rtol=0, atol=1e-5)
        assert torch.equal(said(decoder, look), changed)


def test_it_keeps_the_choice_of_experts_that_balancing_moves(tmp_path: Path, mesh: Meshes) -> None:
    tiny_model(tiny_config("glm4-moe", num_hidden_layers=2)).save_pretrained(tmp_path)
    settings = Trainer(lora={"rank": 4}, mixture={"balance_rate": 0.5})
    decoder = build(tmp_path, settings, "float32", mesh)
    reference = make_reference(decoder, tmp_path, settings, "float32", mesh)
    look = make_batches(make_samples(8, 9, 100))[0]
    prepared, first = prepare(look.micro_batches[0], torch.device("cpu")), said(decoder, look)
    (router,) = routers(decoder).values()
    batch = make_batches(make_samples(8, 0, 100))[0]
    train_step(
        decoder,
        make_optimizer(decoder, AdamW()),
        batch,
        KL,
        rate=1e-3,
        limit=1.0,
        balance_rate=0.5,
        reference=reference,
    )
    moved = router.e_score_correction_bias.clone()
    assert moved.abs().max() >= 0.25
    with lora.silent(decoder):
        assert not torch.allclose(said(decoder, look), first, atol=1e-3), "the bias alone changes it"
    torch.testing.assert_close(reference.logprobs(prepared), first, rtol=0, atol=1e-5)
    assert torch.equal(router.e_score_correction_bias, moved)


def test_logprobs_that_come_with_the_batch_count_before_its_own(model: Path, mesh: Meshes) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    reference = make_reference(decoder, model, Trainer(), "float32", mesh)
    samples = make_samples(8, 5)
    told = [
        msgspec.structs.replace(sample, reference=np.full(len(sample.tokens), -1.0, "<f4"))
        for sample in samples[:4]
    ]
    (batch,) = make_batches([*told, *samples[4:]])
    logprobs, micro = said(decoder, batch), batch.micro_batches[0]
    step = train_step(
        decoder, make_optimizer(decoder, AdamW()), batch, KL, rate=0.0, limit=1.0, reference=reference
    )
    known = ~np.isnan(micro.reference[micro.loss_mask > 0])
    differences = logprobs.double()[torch.from_numpy(known)] + 1.0
    near = differences.clamp(min=-np.log(21))  # below, the estimate goes on in a straight line
    expected = ((-near).exp() + near - 1 + 20 * (near - differences)).sum() / len(known)
    assert step.metrics["reference_kl"] == pytest.approx(float(expected), rel=1e-4)


def test_a_teacher_is_approached_on_what_was_sampled(model: Path, mesh: Meshes) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    samples = []
    for sample in make_samples(8, 5):
        mask = np.where(sample.loss_mask, REF_KL, 0).astype("|u1")
        samples.append(msgspec.structs.replace(sample, loss_mask=mask, temperature=1.0, advantage=0.0))
    (plain,) = make_batches(samples)
    logprobs = said(decoder, plain).numpy()
    liked = np.arange(len(logprobs)) % 2 == 0
    micro = plain.micro_batches[0]
    taught = np.zeros(len(micro.tokens), "<f4")
    taught[micro.loss_mask > 0] = logprobs + np.where(liked, 1.0, -1.0)
    engine = np.zeros(len(micro.tokens), "<f4")
    engine[micro.loss_mask > 0] = logprobs
    batch = msgspec.structs.replace(
        plain, micro_batches=[msgspec.structs.replace(micro, logprobs=engine, reference=taught)]
    )
    optimizer = make_optimizer(decoder, AdamW())
    step = train_step(decoder, optimizer, batch, KL, rate=1e-3, limit=1.0)
    assert step.metrics["tokens_ref_kl"] == len(logprobs) == step.metrics["tokens_trained"]
    assert step.metrics["loss"] == step.metrics["loss_ref_kl"]
    moved = said(decoder, batch).numpy() - logprobs
    assert moved[liked].mean() > 0 > moved[~liked].mean()


def test_a_reference_that_nobody_tells_is_an_error(model: Path, mesh: Meshes) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    with pytest.raises(ValueError, match="compares with a reference"):
        train_step(decoder, make_optimizer(decoder, AdamW()), batch_of(0), KL, rate=1e-3, limit=1.0)


@pytest.mark.slow
def test_it_is_divided_over_ranks_as_the_model_is(
    model: Path, tied_model: Path, mesh: Meshes, tmp_path: Path
) -> None:
    cases = [
        Case(model, "gspo, kl", capacity=100, reference=tied_model),
        Case(model, "gspo, kl", capacity=100, reference=tied_model, recompute=True),
        Case(model, "gspo, kl", samples=1, reference=tied_model),  # the other rank has nothing
    ]
    for case, several in zip(cases, outcomes(2, cases, tmp_path), strict=True):
        assert max(outcome(mesh, case).differences(several).values()) <= 1e-5, case


def test_a_rank_without_work_needs_none(model: Path, mesh: Meshes) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    idle = msgspec.structs.replace(batch_of(0), micro_batches=[])
    step = train_step(decoder, make_optimizer(decoder, AdamW()), idle, KL, rate=1e-3, limit=1.0)
    assert step.metrics["loss"] == 0 and "reference_kl" not in step.metrics


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, False),
        ({"algorithm": {"loss": {"kl": {}}}}, True),
        ({"algorithm": {"loss": {"kl": {}}, "reference": {"endpoint": "http://a:1", "model": "m"}}}, False),
        ({"environments": [{"name": "a", "type": "reverse_text", "component": "ref_kl"}]}, True),
    ],
)
def test_the_trainer_keeps_one_where_a_loss_compares_and_no_other_model_is_named(
    changes: dict[str, Any], kept: bool
) -> None:
    assert trainer_keeps_reference(make_stack(**changes)) is kept
