"""Loss and gradient of a step: however it is cut, blind to what is masked, skipped when not finite."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from trainer_ranks import MAX_TOKENS, OBJECTIVES, Case, outcome, outcomes
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import all_finite, make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.step import accumulate, prepare, train_step
from stackrl.runtime.transport.messages import RL, Sample
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

TOLERANCE = 1e-5


def changed(sample: Sample, **fields) -> Sample:
    return msgspec.structs.replace(sample, **fields)


def worst(differences: dict[str, float]) -> tuple[float, str]:
    return max((value, name) for name, value in differences.items())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_packing_and_micro_batch_size_do_not_matter(model: Path, mesh: Meshes, objective: str) -> None:
    whole = outcome(mesh, Case(model, objective))
    for capacity in (40, 64, 200):
        cut = outcome(mesh, Case(model, objective, capacity=capacity))
        assert worst(whole.differences(cut)) <= (TOLERANCE, "")
    shuffled = make_samples(24, seed=5)
    random.Random(0).shuffle(shuffled)
    assert worst(whole.differences(outcome(mesh, Case(model, objective), shuffled))) <= (TOLERANCE, "")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_is_the_formula_summed_over_documents(model: Path, mesh: Meshes, objective: str) -> None:
    samples = make_samples(24, seed=5)
    decoder = build(model, Trainer(), "float32", mesh)
    total, trained_tokens = 0.0, sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        (batch,) = make_batches([sample])
        micro = prepare(batch.micro_batches[0], torch.device("cpu"))
        with torch.no_grad():
            logprobs, _ = decoder(
                micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures
            )
        tokens = micro.select(RL, logprobs)
        values = OBJECTIVES[objective].loss(tokens).values.double()
        total += {
            "token": values.sum() / trained_tokens,
            "sequence": values.mean() / len(samples),
            "constant": values.sum() / (len(samples) * MAX_TOKENS),
        }[OBJECTIVES[objective].normalize]
    assert outcome(mesh, Case(model, objective)).loss == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_stands_in_masked_places_changes_nothing(model: Path, mesh: Meshes, objective: str) -> None:
    samples = make_samples(12, seed=5)
    clean = outcome(mesh, Case(model, objective), samples)
    for poison in (np.nan, np.inf, -np.inf, 123.0):
        poisoned = [
            changed(s, logprobs=np.where(s.loss_mask, s.logprobs, poison).astype("<f4")) for s in samples
        ]
        assert set(clean.differences(outcome(mesh, Case(model, objective), poisoned)).values()) == {0.0}


def test_a_document_without_trained_tokens_changes_nothing(model: Path, mesh: Meshes) -> None:
    samples = make_samples(12, seed=5)
    silent = [
        changed(s, loss_mask=np.zeros_like(s.loss_mask), temperature=float("nan"), advantage=1e30)
        for s in make_samples(3, seed=6)
    ]
    clean = outcome(mesh, Case(model, "aipo, token"), samples)
    mixed = outcome(mesh, Case(model, "aipo, token"), samples[:6] + silent + samples[6:])
    assert worst(clean.differences(mixed)) <= (TOLERANCE, "")


def test_recomputed_activations_give_the_same_gradient(tied_model: Path, mesh: Meshes) -> None:
    kept = outcome(mesh, Case(tied_model, "aipo, token", capacity=100))
    recomputed = outcome(mesh, Case(tied_model, "aipo, token", capacity=100, recompute=True))
    assert worst(kept.differences(recomputed)) <= (TOLERANCE, "")


def test_a_trained_first_token_is_refused(model: Path, mesh: Meshes) -> None:
    (batch,) = make_batches(make_samples(2, seed=0))
    batch.micro_batches[0].loss_mask = batch.micro_batches[0].loss_mask.copy()
    batch.micro_batches[0].loss_mask[0] = 1
    with pytest.raises(ValueError, match="first token"):
        train(model, mesh, batch)


def train(model: Path, mesh: Meshes, *batches) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of each step and the weights after the last."""
    decoder = build(model, Trainer(), "float32", mesh)
    optimizer = make_optimizer(decoder, AdamW())
    objective = OBJECTIVES["aipo, token"]
    metrics = [
        train_step(decoder, optimizer, batch, objective, rate=1e-3, limit=1.0).metrics for batch in batches
    ]
    return metrics, {name: tensor.clone() for name, tensor in gathered(decoder, torch.float32)}


def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(model: Path, mesh: Meshes) -> None:
    samples = make_samples(12, seed=5)
    logprobs = samples[3].logprobs.copy()
    logprobs[-1] = np.nan
    (good,), (next_good,) = make_batches(samples), make_batches(make_samples(12, seed=6))
    (bad,) = make_batches([*samples[:3], changed(samples[3], logprobs=logprobs)])
    metrics, weights = train(model, mesh, good, bad, next_good)
    expected_metrics, expected = train(model, mesh, good, next_good)
    assert [m["skipped"] for m in metrics] == [0.0, 1.0, 0.0]
    assert [m["weights_finite"] for m in metrics] == [1.0, 1.0, 1.0]
    assert "gradient_norm" not in metrics[1] and "loss" not in metrics[1]
    assert metrics[2] == expected_metrics[1]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_weight_that_is_not_finite_is_seen(model: Path, mesh: Meshes, poison: float) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    assert all_finite(decoder.parameters())
    with torch.no_grad():
        largest = decoder.model.layers[1].mlp.down_proj.weight
        largest[3, 5] = 3e38  # large, but its square is no number
        assert all_finite(decoder.parameters())
        largest[3, 5] = poison
    assert not all_finite(decoder.parameters())
    (batch,) = make_batches(make_samples(4, seed=5))
    objective = OBJECTIVES["aipo, token"]
    step = train_step(decoder, make_optimizer(decoder, AdamW()), batch, objective, rate=1e-3, limit=1.0)
    assert step.metrics["weights_finite"] == 0.0


def test_a_report_holds_the_logprobs_that_the_step_trained_on(model: Path, mesh: Meshes) -> None:
    silent = changed(
        make_samples(1, seed=6)[0], loss_mask=np.zeros_like(make_samples(1, seed=6)[0].loss_mask)
    )
    (batch,) = make_batches([*make_samples(12, seed=5), silent], capacity=100, report=True)
    decoder = build(model, Trainer(), "float32", mesh)
    expected = []
    for micro in batch.micro_batches:
        prepared = prepare(micro, torch.device("cpu"))
        with torch.no_grad():
            expected.append(
                decoder(
                    prepared.tokens,
                    prepared.layout,
                    prepared.predictors,
                    prepared.targets,
                    prepared.temperatures,
                )[0]
            )
    objective, optimizer = OBJECTIVES["aipo, token"], make_optimizer(decoder, AdamW())
    step = train_step(decoder, optimizer, batch, objective, rate=1e-3, limit=1.0)
    assert len(batch.micro_batches) > 2 and step.logprobs.dtype == np.float32
    np.testing.assert_allclose(step.logprobs, torch.cat(expected).numpy(), rtol=0, atol=1e-6)
    (quiet,) = make_batches(make_samples(12, seed=5))
    assert train_step(decoder, optimizer, quiet, objective, rate=1e-3, limit=1.0).logprobs is None


def test_metrics_are_those_of_the_trained_tokens(model: Path, mesh: Meshes) -> None:
    samples = make_samples(24, seed=5)
    (metrics,), _ = train(model, mesh, *make_batches(samples, capacity=100))
    assert metrics["tokens_trained"] == sum(int(s.loss_mask.sum()) for s in samples)
    assert metrics["tokens_packed"] == sum(len(s.tokens) for s in samples)
    assert 0 < metrics["entropy"] <= np.log(264)
    assert 0 < metrics["capped"] < 1 < metrics["ratio_max"]
    assert metrics["mismatch_kl"] > 0


def test_the_mismatch_is_zero_where_the_engine_says_what_the_trainer_says(model: Path, mesh: Meshes) -> None:
    decoder = build(model, Trainer(), "float32", mesh)
    agreeing = []
    for sample in make_samples(8, seed=5):
        micro = prepare(make_batches([sample])[0].micro_batches[0], torch.device("cpu"))
        with torch.no_grad():
            logprobs, _ = decoder(
                micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures
            )
        engine = np.zeros_like(sample.logprobs)
        engine[micro.predictors.numpy() + 1] = logprobs.numpy()
        agreeing.append(changed(sample, logprobs=engine))
    (metrics,), _ = train(model, mesh, *make_batches(agreeing))
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_bfloat16_computes_on_float32_masters(model: Path, mesh: Meshes) -> None:
    (batch,) = make_batches(make_samples(24, seed=5))
    exact = build(model, Trainer(), "float32", mesh)
    rounded = build(model, Trainer(), "bfloat16", mesh)
    objective = OBJECTIVES["supervised"]
    losses = [accumulate(decoder, batch, objective).metrics()["loss"] for decoder in (exact, rounded)]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=1e-2)
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert b.dtype == b.grad.dtype == torch.float32
        assert (a.grad - b.grad.full_tensor()).norm() < 0.1 * a.grad.norm()


@pytest.mark.slow
def test_the_number_of_ranks_does_not_matter(
    model: Path, tied_model: Path, mesh: Meshes, tmp_path: Path
) -> None:
    cases = [
        *(Case(model, objective, capacity=100) for objective in OBJECTIVES),
        Case(tied_model, "aipo, token", capacity=100),
        Case(tied_model, "grpo, sequence", capacity=100, recompute=True),
        Case(model, "aipo, token", samples=1),  # the other rank has nothing
    ]
    for case, several in zip(cases, outcomes(2, cases, tmp_path), strict=True):
        assert worst(outcome(mesh, case).differences(several)) <= (TOLERANCE, ""), case
