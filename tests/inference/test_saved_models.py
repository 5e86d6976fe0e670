"""Engines read what the trainer saves: the tokens that they sample have the trainer's logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_server import RealEngine

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.model import Model, model_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4


@torch.no_grad()
def distance(model: Model, engine: RealEngine) -> float:
    """The largest one between logprobs of the engine and of ``model``."""
    documents = [(len(prompt), prompt + reply.tokens) for prompt, reply in engine.first_words]
    lengths = np.array([len(tokens) for _, tokens in documents])
    tokens = torch.tensor([token for _, document in documents for token in document])
    starts = np.cumsum(lengths) - lengths
    chosen = torch.tensor(
        [
            start + place
            for start, (prompt, document) in zip(starts, documents, strict=True)
            for place in range(prompt, len(document))
        ]
    )
    temperatures = torch.ones(len(chosen))
    logprobs, _ = model(tokens, layout(lengths), chosen - 1, tokens[chosen], temperatures)
    said = torch.tensor([logprob for _, reply in engine.first_words for logprob in reply.logprobs])
    return float((logprobs - said).abs().max())


@pytest.mark.parametrize(
    "real_engine",
    [
        pytest.param(None, id="qwen3"),
        pytest.param("qwen3-moe-tied", id="tied qwen3_moe"),
        pytest.param("qwen3-moe", id="qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("qwen3-tied", id="tied", marks=pytest.mark.nightly),
        pytest.param("llama", id="llama", marks=pytest.mark.nightly),
        pytest.param("glm4-moe", id="glm4_moe", marks=pytest.mark.nightly),
    ],
    indirect=True,
)
def test_sampled_tokens_have_our_logprobs(real_engine: RealEngine, record_property) -> None:
    model = model_of(real_engine.run.model)
    folder.load(model, real_engine.run.model)
    found = distance(model, real_engine)
    record_property("distance", found)
    print(f"{real_engine.run.id}: {found:.1e}")
    assert found < TOLERANCE
    with torch.no_grad():
        model.layers[1].input_layernorm.weight.mul_(1.1)
    assert distance(model, real_engine) > 10 * TOLERANCE
