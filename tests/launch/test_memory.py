"""What a role is said to take, against what others published and what a step of ours was seen to take."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import step_memory
import yaml

import stacks
from stackrl.runtime.launch.planning.accelerators import ACCELERATORS, GIB, accelerator_of, similar
from stackrl.runtime.launch.planning.memory import ALLOCATOR, KEPT_VERSIONS, RoleMemory, memory_of
from stackrl.runtime.launch.planning.trainer_memory import (
    ALLOCATOR_SHARE,
    Settings,
    host_parts,
    moments,
    trainer_phases,
)
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.loader import load
from stackrl.schemas.model import PretrainedModel
from stackrl.schemas.optimizers import SGD, AdamW, Muon, SignSGD
from stackrl.schemas.problems import StackError
from stackrl.schemas.shapes import shape_of
from stackrl.schemas.trainer import Trainer

PUBLISHED = [
    ("Qwen/Qwen3-0.6B", "full", 16384, "recompute", 1, 12.5),
    ("Qwen/Qwen3-0.6B", "full", 65536, "offload", 1, 16.1),
    ("Qwen/Qwen3-0.6B", "lora", 16384, "recompute", 1, 5.1),
    ("Qwen/Qwen3-0.6B", "lora", 65536, "offload", 1, 7.9),
    ("Qwen/Qwen3-0.6B", "supervised", 8192, "recompute", 1, 31.7),
    ("Qwen/Qwen3-4B", "full", 16384, "recompute", 8, 17.1),
    ("Qwen/Qwen3-4B", "lora", 16384, "recompute", 8, 10.3),
    ("Qwen/Qwen3-4B", "lora", 65536, "recompute", 8, 28.8),
    ("Qwen/Qwen3-4B", "lora", 16384, "recompute", 1, 23.3),
    ("Qwen/Qwen3-4B", "lora", 16384, "offload", 1, 20.6),
    ("Qwen/Qwen3-4B", "supervised", 16384, "recompute", 8, 54.6),
    ("Qwen/Qwen3-30B-A3B", "full", 16384, "recompute", 8, 74.6),
    ("Qwen/Qwen3-30B-A3B", "lora", 65536, "recompute", 8, 63.7),
    ("Qwen/Qwen3-30B-A3B", "supervised", 16384, "recompute", 8, 106.4),
    ("PrimeIntellect/INTELLECT-3", "lora", 16384, "recompute", 8, 89.7),
]
"""Peak GiB of a GPU in PRIME-RL's benchmarks of 2026-02-01: one packed sequence, float32 masters, AdamW."""
WHOLE_LOGITS = 16
"""Bytes of a logit where none are spared: in bfloat16 and float32, their softmax, and the gradients of both.
PRIME-RL's supervised runs have no chunks; our trainer always has."""


def shape(name):
    return shape_of(PretrainedModel(id=name)).shape


def settings(*, ranks=1, device="cuda", dtype="bfloat16", context=1, expert=1, **trainer):
    degrees = Degrees(ranks, 1, ranks // context, context, expert)
    made = Trainer.model_validate(trainer)
    return Settings(made, degrees, device, dtype, [made.optimizer])


def peak(phases):
    return max(sum(parts.values()) for parts in phases.values())


@pytest.mark.parametrize(("model", "kind", "length", "way", "ranks", "published"), PUBLISHED)
def test_the_trainer_takes_what_others_published(model, kind, length, way, ranks, published):
    made = settings(
        ranks=ranks,
        sequence_length=length,
        activation_checkpointing="full",
        activation_offloading=way == "offload",
        lora={"rank": 16} if kind == "lora" else None,
    )
    phases = trainer_phases(shape(model), made)
    if kind == "supervised":
        phases["head"]["logits"] = WHOLE_LOGITS * length * shape(model).vocabulary
    assert peak(phases) * (1 + ALLOCATOR_SHARE) / GIB == pytest.approx(published, rel=0.2)


def test_masters_gradients_and_moments_are_cut_over_the_ranks_of_a_copy():
    parameters = 30_532_122_624  # Qwen3-30B-A3B's, as its files have them
    for ranks in (1, 8, 64):
        parts = trainer_phases(shape("Qwen/Qwen3-30B-A3B"), settings(ranks=ranks))["optimizer step"]
        assert parts["parameters"] == parts["gradients"] == pytest.approx(4 * parameters / ranks, rel=1e-6)
        assert parts["optimizer"] == pytest.approx(8 * parameters / ranks, rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (AdamW(), 2),
        (Muon(type="muon"), 1),
        (SGD(type="sgd"), 1),
        (SGD(type="sgd", momentum=0.0), 0),
        (SignSGD(type="signsgd"), 0),
    ],
)
def test_moments_of_each_optimizer(optimizer, expected):
    assert moments(optimizer) == expected


def test_what_a_step_makes_for_a_moment():
    """Qwen3-4B: rows of the vocabulary and width by hand, a layer from its matrices."""
    rows, width = 151936, 2560
    layer = width * (2 * 4096 + 2 * 1024 + 3 * 9728) + 2 * width + 2 * 128
    usual = {"ranks": 8, "sequence_length": 16384, "activation_checkpointing": "full", "head_chunk": 512}
    phases = trainer_phases(shape("Qwen/Qwen3-4B"), settings(**usual))
    # a chunk in bfloat16, three softmaxes of 2²⁶, the weights' gradient in float32 and in bfloat16
    assert phases["head"]["logits"] == 512 * rows * 2 + 3 * 4 * 2**26 + rows * width * 6
    # as computed and in float32, and the head's
    assert phases["backward"]["a layer's gradients"] == layer * 6 + rows * width * 2
    assert phases["backward"]["gathered"] == (rows * width + width) * 2 + 2 * layer * 2
    assert phases["backward"]["activations"] >= 36 * 16384 * width * 2  # the inputs of all layers
    adapters = 36 * 16 * (2 * (width + 4096) + 2 * (width + 1024) + 3 * (width + 9728))
    frozen = trainer_phases(shape("Qwen/Qwen3-4B"), settings(**usual, lora={"rank": 16}))
    assert frozen["backward"]["gradients"] == pytest.approx(4 * adapters / 8)
    assert frozen["backward"]["a layer's gradients"] == pytest.approx(6 * adapters / 36)
    assert frozen["head"]["logits"] == 512 * rows * 2 + 3 * 4 * 2**26


def test_a_reference_is_a_second_copy_of_the_masters():
    model = shape("Qwen/Qwen3-4B")
    made = settings(ranks=8, sequence_length=16384)
    plain, both = (trainer_phases(model, replace(made, reference=kept)) for kept in (False, True))
    for phase, parts in both.items():
        assert parts["reference"] == parts["parameters"] == plain[phase]["parameters"]
        assert sum(parts.values()) == sum(plain[phase].values()) + parts["reference"]
    away = settings(ranks=8, sequence_length=16384, optimizer_offload=True)
    assert trainer_phases(model, replace(away, reference=True))["backward"]["reference"] == 0
    assert host_parts(model, replace(away, reference=True))["reference"] == both["publish"]["reference"]


def test_what_saves_memory_saves_it():
    model = shape("Qwen/Qwen3-30B-A3B")
    usual = {"ranks": 8, "sequence_length": 16384}
    plain = peak(trainer_phases(model, settings(**usual)))
    ways = [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": {"type": "selective", "parts": ["experts"]}},
        {"activation_offloading": True},
        {"optimizer_offload": True},
        {"lora": {"rank": 16}},
        {"context": 4},
        {"sequence_length": 8192},
        {"ranks": 16},
        {"optimizer": {"type": "signsgd"}},
    ]
    for way in ways:
        assert peak(trainer_phases(model, settings(**(usual | way)))) < 0.95 * plain, way
    kept = settings(**usual, reshard_after_forward=False)
    assert peak(trainer_phases(model, kept)) > plain + 50e9  # the whole model in bfloat16 on every GPU


def test_what_leaves_the_gpu_is_in_the_machines_memory():
    made = settings(ranks=8, optimizer_offload=True, activation_offloading=True, sequence_length=16384)
    model = shape("Qwen/Qwen3-4B")
    parts = trainer_phases(model, made)["backward"]
    assert parts["parameters"] == parts["optimizer"] == 0
    host = host_parts(model, made)
    assert host["parameters, gradients, optimizer"] == pytest.approx(16 * 4.022e9 / 8, rel=0.01)
    assert host["activations"] > 50e9  # nothing is computed again, so all of it waits
    on_cpu = settings(device="cpu", dtype="float32", optimizer_offload=True, activation_offloading=True)
    assert trainer_phases(model, on_cpu)["backward"]["optimizer"] == pytest.approx(8 * 4.022e9, rel=0.01)


def test_ranks_that_share_experts_gather_fewer():
    model = shape("Qwen/Qwen3-30B-A3B")
    alone, shared = (trainer_phases(model, settings(ranks=8, expert=expert))["backward"] for expert in (1, 8))
    assert alone["parameters"] == shared["parameters"]
    assert shared["gathered"] < 0.6 * alone["gathered"]


# ---- roles of a stack

SHARED = {"trainer": {"gpus": 1}, "inference": {"share": "trainer", "engine_memory": "8GiB"}}
HALVES = {"trainer": {"gpus": 4}, "inference": {"gpus": 4}}
NODES = {"trainer": {"nodes": 1}, "inference": {"nodes": "rest"}}


def written(folder, model, accelerators, roles, *, nodes=1, trainer=None, inference=None, **keys):
    """A stack file on machines with ``accelerators``; full checkpointing, sequences of 2,048 tokens."""
    task = yaml.safe_load(stacks.GOOD)
    stack = task["_metadata"]["stack"]
    stack |= {"model": {"id": model} if isinstance(model, str) else model, "roles": roles, **keys}
    stack["trainer"] = {"sequence_length": 2048, "activation_checkpointing": "full"} | (trainer or {})
    stack["inference"] = {"max_model_length": 2048} | (inference or {})
    resources = {"accelerators": accelerators} if isinstance(accelerators, str) else accelerators
    task |= {"num_nodes": nodes, "resources": resources, "secrets": {"STACKRL_TOKEN": None}}
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


def roles_of(*arguments, **options) -> dict[str, RoleMemory]:
    loaded = load(written(*arguments, **options))
    return {role.role: role for role in memory_of(loaded.stack, loaded.task)}


def refusals(folder, *arguments, **options) -> list[str]:
    """What is said against the stack; empty where it is fine."""
    try:
        load(written(folder, *arguments, **options))
    except StackError as error:
        return [str(problem).replace(f"{folder / 'small.yaml'}:", "") for problem in error.problems]
    return []


def test_a_gpu_that_is_shared(tmp_path):
    roles = roles_of(tmp_path, "Qwen/Qwen3-0.6B", "RTX4090:1", SHARED)
    trainer, engine = roles["trainer"], roles["inference"]
    whole = accelerator_of("RTX4090").memory
    assert trainer.capacity == pytest.approx(0.95 * (whole - 9 * GIB), rel=0.001)
    # 2 (key and value) · 28 layers · 8 heads of 128 · 2 bytes
    assert engine.cache.bytes_per_token == 2 * 28 * 8 * 128 * 2
    serve = engine.phases[0].parts
    assert serve["weights"] == pytest.approx(2 * 0.596e9, rel=0.01)
    assert sum(serve.values()) - serve["left free"] == 7 * GIB  # one is the driver's
    # one layer and the embedding, in bfloat16
    layer = 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 2 * 1024 + 2 * 128
    assert engine.phases[1].parts["arriving layer"] == 2 * (layer + 151936 * 1024)
    assert engine.cache.tokens == serve["cache"] // engine.cache.bytes_per_token
    assert engine.cache.requests == engine.cache.tokens // 2048
    assert not trainer.lacking
    assert not engine.lacking


def test_engines_of_several_gpus(tmp_path):
    model, options = "Qwen/Qwen3-30B-A3B", {"inference": {"max_model_length": 1024, "max_requests": 4}}
    one = roles_of(tmp_path, model, "H200:8", HALVES, **options)["inference"]
    options["inference"]["tensor_parallel"] = 4
    four = roles_of(tmp_path, model, "H200:8", HALVES, **options)["inference"]
    parts, of_four = (engine.phases[0].parts for engine in (one, four))
    assert of_four["weights"] == pytest.approx(parts["weights"] / 4, rel=0.02)
    assert one.cache.bytes_per_token == four.cache.bytes_per_token == 2 * 48 * 4 * 128 * 2
    assert four.cache.tokens > 4 * one.cache.tokens  # the weights are there once
    assert one.cache.requests == four.cache.requests == 4
    options["inference"]["tensor_parallel"] = 8
    split = {"trainer": {"gpus": 8}, "inference": {"gpus": 8}}
    wide = roles_of(tmp_path, model, "H200:16", split, **options)["inference"]
    assert wide.cache.bytes_per_token == 2 * one.cache.bytes_per_token  # 4 heads of keys, 8 GPUs


def test_copies_of_a_mixture_in_one_engine_share_its_experts(tmp_path):
    model, options = "Qwen/Qwen3-30B-A3B", {"inference": {"max_model_length": 1024, "max_requests": 4}}
    copies = {"trainer": {"gpus": 4}, "inference": {"gpus": 4, "data_parallel": 4}}
    alone, shared = (
        roles_of(tmp_path, model, "H200:8", split, **options)["inference"].phases[0].parts["weights"]
        for split in (HALVES, copies)
    )
    assert alone / 4 < shared < alone / 3, "what is no expert is there in each"


def test_quantised_engines(tmp_path):
    plain = roles_of(tmp_path, "Qwen/Qwen3-32B", "H200:8", HALVES)["inference"].phases[0].parts
    options = {"inference": {"quantization": "fp8"}}
    small = roles_of(tmp_path, "Qwen/Qwen3-32B", "H200:8", HALVES, **options)["inference"].phases[0].parts
    outer = 2 * 2 * 151936 * 5120  # embedding and head stay in bfloat16
    assert small["weights"] - outer == pytest.approx((plain["weights"] - outer) / 2, rel=0.01)


def test_latent_attention_keeps_little(tmp_path):
    roles = {"trainer": {"nodes": 20}, "prefill": {"nodes": 2}, "decode": {"nodes": 2}}
    options = {"nodes": 24, "inference": {"tensor_parallel": 8, "quantization": "fp8"}}
    shared = {"checkpoint": {"path": "/shared"}, "trainer": {"parallel": {"expert": 32}}}
    found = roles_of(tmp_path, "zai-org/GLM-5", "H200:8", roles, **options, **shared)
    assert [*found] == ["trainer", "prefill", "decode"]
    # 512 + 64 numbers of two bytes, and the indexer's 128 of one with a scale, on each of 8 GPUs
    assert found["decode"].cache.bytes_per_token == 8 * 78 * (576 * 2 + 132)


def test_without_gpus(tmp_path):
    roles = {"trainer": {"processes": 1}, "inference": {"processes": 1}}
    found = roles_of(tmp_path, "HuggingFaceTB/SmolLM2-135M", {"cpus": 4}, roles)
    assert found["trainer"].capacity is None
    assert ALLOCATOR not in found["trainer"].peak.parts
    assert found["inference"].cache.tokens == GIB // (2 * 30 * 3 * 64 * 2)
    assert found["trainer"].host["versions for engines"] == pytest.approx(
        KEPT_VERSIONS * 2 * 134.5e6, rel=0.01
    )
    long = refusals(
        tmp_path,
        "HuggingFaceTB/SmolLM2-135M",
        {"cpus": 4},
        roles,
        inference={"max_model_length": 8192, "cache_memory": "100MiB"},
        trainer={"sequence_length": 8192},
    )
    assert len(long) == 1
    assert "does not fit" in long[0]
    assert "inference.cache_memory: 1GiB" in long[0]


# ---- what fits and what does not


@pytest.mark.parametrize(
    ("model", "accelerators", "nodes", "roles", "trainer"),
    [
        ("Qwen/Qwen3-0.6B", "RTX4090:1", 1, SHARED, {}),
        ("Qwen/Qwen3-4B", "H100:8", 1, HALVES, {"sequence_length": 16384}),
        ("Qwen/Qwen3-8B", "A100-80GB:8", 1, HALVES, {"sequence_length": 8192}),
        ("Qwen/Qwen3-30B-A3B", "H200:8", 2, NODES, {"sequence_length": 16384}),
        ("PrimeIntellect/INTELLECT-3", "H200:8", 2, NODES, {"sequence_length": 16384, "lora": {}}),
    ],
)
def test_what_is_known_to_fit(tmp_path, model, accelerators, nodes, roles, trainer):
    wide = {"inference": {"tensor_parallel": 4}}
    options = wide if accelerators.endswith(":8") else {}
    assert refusals(tmp_path, model, accelerators, roles, nodes=nodes, trainer=trainer, **options) == []


def test_what_is_known_not_to_fit(tmp_path):
    one = {"trainer": {"gpus": 1}, "inference": {"gpus": 1}}
    said = refusals(tmp_path, "Qwen/Qwen3-30B-A3B", "H100:2", one)
    assert [line.split(": ")[1] for line in said] == ["roles.trainer"]  # 57 GiB for the engine fit
    missing = re.search(r"so ([0-9.]+) are missing", said[0])
    assert float(missing[1]) > 380  # 455 GiB of masters, gradients and moments on 79 GiB
    assert "GPUs for the trainer instead of 1" in said[0]

    said = refusals(
        tmp_path,
        "zai-org/GLM-5",
        "H200:8",
        {"trainer": {"gpus": 4}, "inference": {"gpus": 4}},
        inference={"tensor_parallel": 4, "quantization": "fp8"},
    )
    assert {line.split(": ")[1] for line in said} == {"roles.trainer", "roles.inference"}

    larger = {"trainer": {"gpus": 1}, "inference": {"share": "trainer", "engine_memory": "12GiB"}}
    (said,) = refusals(tmp_path, "Qwen/Qwen3-4B", "RTX4090:1", larger)
    assert "roles.trainer" in said


def test_a_mend_mends(tmp_path):
    long = {"sequence_length": 65536, "activation_checkpointing": "none"}
    (said,) = refusals(tmp_path, "Qwen/Qwen3-8B", "H100:8", HALVES, trainer=long)
    assert "trainer.activation_checkpointing: full; or trainer.activation_offloading: true" in said
    assert refusals(tmp_path, "Qwen/Qwen3-8B", "H100:8", HALVES, trainer={"sequence_length": 65536}) == []

    (said,) = refusals(tmp_path, "Qwen/Qwen3-30B-A3B", "H100:8", HALVES, trainer={"sequence_length": 4096})
    assert said.endswith("; or GPUs as large as the H200")
    count = int(re.search(r"([0-9]+) GPUs for the trainer instead of 4", said)[1])
    more = {"trainer": {"gpus": count}, "inference": {"gpus": 4}}
    assert refusals(tmp_path, "Qwen/Qwen3-30B-A3B", f"H100:{count + 4}", more) == []

    one = {"trainer": {"gpus": 4}, "inference": {"gpus": 4}}
    (said,) = refusals(tmp_path, "Qwen/Qwen3-32B", "A100:8", one, trainer={"lora": {}})
    assert "roles.inference" in said
    assert "inference.tensor_parallel: 2" in said


def test_every_kind_of_machine_has_to_do(tmp_path):
    choices = {"any_of": [{"accelerators": "H200:8"}, {"accelerators": "L40S:8"}]}
    (said,) = refusals(
        tmp_path,
        "Qwen/Qwen3-30B-A3B",
        choices,
        {"trainer": {"nodes": 1}, "inference": {"nodes": 1}},
        nodes=2,
        inference={"tensor_parallel": 4},
    )
    assert "of a L40S" in said


def test_nothing_is_said_of_what_is_not_known(tmp_path):
    assert (
        refusals(tmp_path, "somebody/unheard-of", "L4:2", {"trainer": {"gpus": 1}, "inference": {"gpus": 1}})
        == []
    )
    assert (
        roles_of(tmp_path, "somebody/unheard-of", "L4:2", {"trainer": {"gpus": 1}, "inference": {"gpus": 1}})
        == {}
    )
    other = {"trainer": {"gpus": 4}, "inference": {"gpus": 4}}
    assert refusals(tmp_path, "Qwen/Qwen3-235B-A22B", "Gaudi2:8", other) == []


@pytest.mark.parametrize(
    ("accelerators", "place"),
    [
        ("H1000:8", "resources.accelerators"),
        (
            {"any_of": [{"accelerators": "H200:8"}, {"accelerators": "H2OO:8"}]},
            "resources.any_of.1.accelerators",
        ),
        ({"accelerators": {"RTX409O": 8}}, "resources.accelerators.RTX409O"),
    ],
)
def test_a_gpu_that_nobody_makes(tmp_path, accelerators, place):
    (said,) = refusals(tmp_path, "Qwen/Qwen3-0.6B", accelerators, HALVES)
    assert place in said
    assert "did you mean" in said


def test_names_of_gpus():
    names = [name.lower() for one in ACCELERATORS for name in (one.name, *one.other_names)]
    assert len(names) == len(set(names))
    wanted = "RTX3090 RTX4090 RTX5090 L4 L40S A100 A100-80GB H100 H200 B200 GB200 B300 MI300X"
    assert all(accelerator_of(name) for name in wanted.split())
    assert accelerator_of("h100").memory == pytest.approx(80e9, rel=0.08)
    assert similar("H10O") == "H100"
    assert similar("tpu-v5e-8") is None


# ---- a step of ours

TINY = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
MIXTURE = TINY | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "trainer"),
    [
        pytest.param("qwen3", TINY | {"tie_word_embeddings": True}, {}, marks=pytest.mark.nightly),
        pytest.param(
            "qwen3",
            TINY | {"tie_word_embeddings": True},
            {"activation_checkpointing": "full"},
            marks=pytest.mark.nightly,
        ),
        ("qwen3_moe", MIXTURE, {"activation_checkpointing": "full"}),
    ],
)
def test_a_step_takes_what_was_planned(tmp_path, family, config, trainer):
    """The resident size of a process that trains, at its highest, against the plan for a CPU."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config)).float().save_pretrained(tmp_path)
    trainer = {"sequence_length": 2048, **trainer}
    arguments = (tmp_path, json.dumps(trainer), "float32", "2048", "512")
    process = subprocess.run(
        [sys.executable, step_memory.__file__, *map(str, arguments)],
        env=os.environ | step_memory.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    made = settings(device="cpu", dtype="float32", **trainer)
    known = shape_of(PretrainedModel(id=str(tmp_path))).shape
    assert peak(trainer_phases(known, made)) == pytest.approx(int(process.stdout), rel=0.2)
