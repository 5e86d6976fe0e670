"""Parameters counted from a shape, against those of the trainer's own modules."""

import pytest
import torch
from tiny_models import tiny_config

from stackrl.runtime.launch.planning import layer_memory, memory, trainer_memory
from stackrl.runtime.launch.planning.parameters import linears, parameters_of
from stackrl.runtime.trainer import head, lora, shared_gpu
from stackrl.runtime.trainer.models import latent
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import FAMILIES
from stackrl.runtime.trainer.models.names import is_adapter
from stackrl.runtime.transport import weights
from stackrl.schemas.lora import Lora
from stackrl.schemas.model import PretrainedModel
from stackrl.schemas.shapes import shape_of

KINDS = ("qwen3", "qwen3-tied", "qwen3-moe", "llama", "glm4-moe", "glm5", "minimax-m2")


def shape_and_model(kind):
    config = tiny_config(kind)
    shape = FAMILIES[config.model_type](config.to_dict())
    with torch.device("meta"):
        return shape, Decoder(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_are_counted(kind):
    shape, model = shape_and_model(kind)
    counted = parameters_of(shape)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    for layer, module in zip(counted.layers, model.layers, strict=True):
        assert layer.total == sum(parameter.numel() for parameter in module.parameters())
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        assert layer.indexer == sum(parameter.numel() for parameter in frozen)
        experts = [parameter for name, parameter in module.named_parameters() if ".experts." in name]
        assert layer.experts == sum(parameter.numel() for parameter in experts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [None, ["o_proj", "down_proj"]])
def test_adapters_are_counted(kind, targets):
    shape, model = shape_and_model(kind)
    settings = Lora(rank=4, targets=targets)
    lora.add_adapters(model, settings)
    counted = sum(
        linear.adapter(4)
        for layer in shape.layers
        for linear in linears(layer, shape.hidden)
        if targets is None or linear.name in targets
    )
    assert counted == sum(tensor.numel() for name, tensor in model.state_dict().items() if is_adapter(name))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen/Qwen3-0.6B", 0.596, 0.596),
        ("Qwen/Qwen3-32B", 32.762, 32.0),
        ("Qwen/Qwen3-30B-A3B", 30.532, 3.04),
        ("Qwen/Qwen3-235B-A22B", 235.094, 21.6),
        ("meta-llama/Llama-3.1-8B", 8.030, 7.5),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345, 0.1345),
        ("zai-org/GLM-4.5-Air", 106.852, 12.8),
        ("zai-org/GLM-5", 743.911, 40.8),
        ("MiniMaxAI/MiniMax-M2.5", 228.690, 10.4),
    ],
)
def test_known_models_have_the_size_in_their_name(name, billions, active):
    counted = parameters_of(shape_of(PretrainedModel(id=name)).shape)
    assert counted.total / 1e9 == pytest.approx(billions, rel=1e-3)
    assert counted.multiplied / 1e9 == pytest.approx(active, rel=0.01)


def test_the_plan_counts_with_the_codes_own_numbers():
    """It cannot import them: they stand in modules that need torch."""
    assert trainer_memory.SOFTMAX_AT_ONCE == head.AT_ONCE
    assert layer_memory.SCORED_AT_ONCE == latent.SCORED_AT_ONCE
    assert memory.KEPT_VERSIONS == weights.KEPT_VERSIONS
    assert memory.HEADROOM == shared_gpu.HEADROOM
