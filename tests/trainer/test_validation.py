"""The loss of held-out rows: transformers' own, on any number of ranks, without a trace in the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_runs import make_batches, make_samples, make_stack
from transformers import AutoModelForCausalLM
from validation_ranks import held_out, measured

from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.validation import validate
from stackrl.runtime.transport.messages import Sample
from stackrl.schemas.trainer import Trainer


def expected(model: Path, samples: Sequence[Sample]) -> tuple[float, int]:
    """Mean −log π by transformers, document by document, and over how many tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = 0.0, 0
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = reference(tokens[None]).logits[0].double().log_softmax(-1)
        (places,) = np.nonzero(sample.loss_mask)
        total -= float(logprobs[places - 1, tokens[places]].sum())
        count += len(places)
    return total / count, count


def test_the_loss_is_that_of_transformers_however_it_is_packed(model: Path, mesh: Meshes) -> None:
    loss, tokens = expected(model, held_out())
    decoder = build(model, Trainer(), "float32", mesh)
    for capacity in (40, 4096):
        [batch] = make_batches(held_out(), capacity=capacity)
        found = validate(decoder, batch.micro_batches)
        assert found["validation_loss"] == pytest.approx(loss, rel=1e-6)
        assert found["validation_tokens"] == tokens


def test_measuring_changes_nothing(model: Path, mesh: Meshes) -> None:
    """The steps with and without held-out rows are the same, and so are the weights in the end."""
    after, losses = [], []
    for out in ([], held_out()):
        learner = Learner(make_stack(), build(model, Trainer(), "float32", mesh))
        micro_batches = make_batches(out)[0].micro_batches if out else []
        for step in range(2):
            [batch] = make_batches(make_samples(6, seed=step), index=step, stage="warmup", stage_step=step)
            batch.held_out = micro_batches
            metrics = learner.apply(batch).metrics
            losses.append(metrics["loss"])
            assert ("validation_loss" in metrics) == bool(out)
        assert all(parameter.grad is None for parameter in learner.model.parameters())
        assert learner.model.training
        after.append({name: tensor.clone() for name, tensor in gathered(learner.model, torch.float32)})
    assert losses[:2] == losses[2:]
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


@pytest.mark.slow
def test_ranks_share_the_rows_and_one_may_have_none(model: Path, tmp_path: Path) -> None:
    losses = measured(2, model, tmp_path)
    samples = (held_out(), held_out()[:1])
    assert losses == [pytest.approx(expected(model, each)[0], rel=1e-6) for each in samples]
