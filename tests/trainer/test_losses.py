"""Losses against float64 written out token by token, and the weights of each normalisation."""

from __future__ import annotations

import math

import pytest
import torch

from stackrl.runtime.trainer import losses
from stackrl.runtime.trainer.losses import TrainedTokens
from stackrl.schemas.algorithm import AipoLoss, GrpoLoss

LOGPROBS = [-0.5, -1.0, -2.0, -3.0, -0.1, -1.5, -4.0]
ENGINE = [-0.5, -2.5, -1.0, -2.9, -0.6, -1.1, -60.0]
ADVANTAGES = [1.0, 0.7, -0.4, -2.0, 1.5, 0.0, 0.3]


def tokens(dtype: torch.dtype = torch.float32) -> TrainedTokens:
    logprobs, engine, advantages = (
        torch.tensor(values, dtype=dtype) for values in (LOGPROBS, ENGINE, ADVANTAGES)
    )
    return TrainedTokens(logprobs.requires_grad_(), engine, advantages)


def aipo_by_hand(logprob: float, engine: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(min(20.0, logprob - engine))
    weight = min(ratio, 2.0)
    return -weight * advantage * logprob, -weight * advantage, ratio > 2.0


def grpo_by_hand(logprob: float, engine: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(min(20.0, logprob - engine))
    clipped = min(max(ratio, 0.8), 1.3)
    free = ratio * advantage <= clipped * advantage
    beyond = logprob - engine > 20.0  # the limit of the log ratio is a constant
    slope = -ratio * advantage if free and not beyond else 0.0
    return -min(ratio * advantage, clipped * advantage), slope, not free


CASES = [
    (AipoLoss(ratio_cap=2.0), aipo_by_hand),
    (GrpoLoss(type="grpo", clip_low=0.2, clip_high=0.3), grpo_by_hand),
]


@pytest.mark.parametrize(("settings", "by_hand"), CASES, ids=["aipo", "grpo"])
def test_values_and_gradients_equal_float64_by_hand(settings, by_hand) -> None:
    inputs = tokens()
    loss = losses.make(settings)(inputs)
    loss.values.sum().backward()
    # the same float32 inputs, seen as float64
    seen = zip(
        inputs.logprobs.tolist(), inputs.engine_logprobs.tolist(), inputs.advantages.tolist(), strict=True
    )
    values, slopes, capped = (
        list(column) for column in zip(*(by_hand(*token) for token in seen), strict=True)
    )
    torch.testing.assert_close(loss.values.double(), torch.tensor(values).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        inputs.logprobs.grad.double(), torch.tensor(slopes).double(), rtol=1e-6, atol=1e-6
    )
    assert loss.capped.tolist() == capped
    assert any(capped) and not all(capped)


def test_the_cap_of_aipo_has_one_side() -> None:
    inputs = TrainedTokens(*(torch.tensor([value]) for value in (-9.0, -1.0, 1.0)))
    assert losses.make(AipoLoss(ratio_cap=2.0))(inputs).values.item() == pytest.approx(9.0 * math.exp(-8.0))


def test_supervised_is_cross_entropy() -> None:
    inputs = tokens()
    loss = losses.supervised(inputs)
    loss.values.sum().backward()
    assert loss.values.tolist() == [-value for value in inputs.logprobs.tolist()]
    assert inputs.logprobs.grad.eq(-1).all()


@pytest.mark.parametrize("settings", [case[0] for case in CASES], ids=["aipo", "grpo"])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_far_apart_policies_stay_finite(settings, difference: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    inputs = TrainedTokens(logprobs, logprobs.detach() - difference, torch.tensor([-3.0]))
    loss = losses.make(settings)(inputs).values.sum()
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_every_loss_of_the_language_has_a_function() -> None:
    assert set(losses.LOSSES) == {"aipo", "grpo"}
    assert all(losses.LOSSES[case.type] for case, _ in CASES)


DOCUMENTS = torch.tensor([0, 0, 0, 2, 2, 3])


def weights(normalize: str) -> list[float]:
    return losses.token_weights(normalize, DOCUMENTS, tokens=20, sequences=5, max_tokens=8).tolist()


def test_token_weights_are_a_mean_over_tokens() -> None:
    assert weights("token") == pytest.approx([1 / 20] * 6)


def test_sequence_weights_are_a_mean_over_documents_of_their_means() -> None:
    assert weights("sequence") == pytest.approx([1 / 15] * 3 + [1 / 10] * 2 + [1 / 5])


def test_constant_weights_know_nothing_of_the_lengths() -> None:
    assert weights("constant") == pytest.approx([1 / 40] * 6)


def test_a_step_without_trained_tokens_has_finite_weights() -> None:
    for normalize in ("token", "sequence", "constant"):
        none = losses.token_weights(normalize, DOCUMENTS[:0], tokens=0, sequences=0, max_tokens=8)
        assert none.shape == (0,)
