"""Our decoder against transformers: the same numbers from the same weights, packed or padded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import BYTES, tiny_config, tiny_model

from stackrl.runtime.trainer.activations import keep_less
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.families import FAMILIES, ModelError, shape_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "qwen3": tiny_config("qwen3"),
    "qwen3, tied, biases": tiny_config("qwen3-tied", attention_bias=True),
    "llama, tied": tiny_config("llama", tie_word_embeddings=True),
    "llama, biases": tiny_config("llama", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    "llama, scaled rope": tiny_config("llama", rope_parameters=LLAMA3),
}
LENGTHS = [9, 30, 2, 70, 17]


def reference(config) -> torch.nn.Module:
    model = tiny_model(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one and biases of zero would hide mistakes
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def ours(config, model: torch.nn.Module, **options) -> Decoder:
    decoder = Decoder(FAMILIES[config.model_type](config.to_dict()), **options)
    assert {name for name, _ in decoder.named_parameters()} == {name for name, _ in model.named_parameters()}
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    decoder.load_state_dict(state)
    return decoder


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(BYTES, (length,), generator=generator) for length in LENGTHS]


def padded_logits(model: torch.nn.Module) -> list[torch.Tensor]:
    """transformers on the documents padded to a rectangle, the logits of each real token."""
    rows = torch.nn.utils.rnn.pad_sequence(documents(), batch_first=True)
    mask = torch.arange(rows.shape[1]) < torch.tensor(LENGTHS)[:, None]
    logits = model(input_ids=rows, attention_mask=mask.long()).logits
    return [row[:length] for row, length in zip(logits, LENGTHS, strict=True)]


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logits_equal_transformers(config) -> None:
    model = reference(config)
    decoder = ours(config, model)
    hidden = decoder.model(torch.cat(documents()), layout(np.array(LENGTHS)))
    torch.testing.assert_close(
        hidden @ decoder.head_weight.T, torch.cat(padded_logits(model)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logprobs_and_gradients_equal_transformers(config, recompute: bool) -> None:
    model = reference(config)
    decoder = ours(config, model, head_chunk=16)
    keep_less(decoder, "full" if recompute else "none", offloading=False)
    tokens, starts = torch.cat(documents()), np.cumsum(LENGTHS) - LENGTHS
    chosen = torch.tensor([i for i in range(sum(LENGTHS)) if i not in starts and i % 3])
    temperatures = torch.full((len(chosen),), 0.7)
    logprobs, _ = decoder(tokens, layout(np.array(LENGTHS)), chosen - 1, tokens[chosen], temperatures)
    logprobs.mean().backward()

    distribution = torch.log_softmax(torch.cat(padded_logits(model)) / 0.7, dim=-1)
    expected = distribution[chosen - 1, tokens[chosen]]
    expected.mean().backward()

    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    gradients = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        exact = gradients[name].grad
        assert (parameter.grad - exact).norm() <= 1e-4 * exact.norm(), name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mamba"}, "no model family 'mamba'.*llama, qwen3"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True}, "sliding attention window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope scaling 'yarn'"),
        ({"attention_dropout": 0.1}, "dropout"),
    ],
)
def test_what_the_trainer_lacks_is_refused(tmp_path, changes: dict, complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["qwen3"].to_dict() | changes))
    with pytest.raises(ModelError, match=complaint):
        shape_of(tmp_path)


def test_older_spelling_of_rope_is_read(tmp_path) -> None:
    config = CASES["llama, scaled rope"].to_dict()
    shape = FAMILIES["llama"](config)
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(tmp_path) == shape


def test_a_folder_without_config_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        shape_of(tmp_path)
