"""How long a step may take: arithmetic against published figures, and which side waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stackrl.runtime.launch.planning import steptime
from stackrl.runtime.launch.planning.accelerators import accelerator_of
from stackrl.runtime.launch.planning.memory import Cache
from stackrl.runtime.launch.planning.steptime import Engines, Lengths, Passes, Ranks, StepTime
from stackrl.runtime.launch.planning.work import work_of
from stackrl.runtime.trainer.models.shape import GroupedAttention, Layer, Mlp, Rope, Shape
from stackrl.schemas.activations import SelectiveCheckpointing
from stackrl.schemas.degrees import Degrees
from stackrl.schemas.lora import Lora
from stackrl.schemas.model import PretrainedModel
from stackrl.schemas.shapes import shape_of
from stackrl.schemas.trainer import Trainer

GB = 1e9


def work(name: str):
    return work_of(shape_of(PretrainedModel(id=name)).shape)


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("Qwen/Qwen3-0.6B", 0.6, 0.6),
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("zai-org/GLM-4.5-Air", 106, 12),
        ("zai-org/GLM-5", 744, 40),
        ("MiniMaxAI/MiniMax-M2", 230, 10),
    ],
)
def test_weights_as_their_makers_count_them(name, weights, active):
    counted = work(name)
    assert counted.weights / GB == pytest.approx(weights, rel=0.02)
    assert (counted.common + counted.chosen * counted.experts) / GB == pytest.approx(active, rel=0.1)


def test_operations_of_a_small_model():
    attention = GroupedAttention(heads=4, key_value_heads=2, head_size=8)
    small = work_of(Shape(100, 32, 1e-6, Rope(1e4, 8), True, (Layer(attention, Mlp(64)),) * 2))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32
    assert small.common == 100 * 32 + 2 * layer
    pairs = 2 * 2 * 32  # scores and values of both layers
    assert small.operations(10) == 2 * (small.common + pairs * 10)
    assert small.operations(10, recent=False) == 2 * (small.common + pairs * 5)
    assert small.weights_read(7) == small.common


def test_a_batch_reads_the_experts_that_it_chose():
    glm = work("zai-org/GLM-5")
    one, all_but = glm.weights_read(1), glm.weights_read(10_000)
    assert one == pytest.approx(glm.common + glm.experts * 8 / 256)
    assert all_but == pytest.approx(glm.common + glm.experts)
    assert one < all_but
    some = (glm.weights_read(16) - glm.common) / glm.experts
    assert some == pytest.approx(0.398, abs=0.001)  # not 16 × 8 of 256: some choose the same ones


def test_sparse_attention_looks_at_no_more_than_it_chooses():
    glm = work("zai-org/GLM-5")
    chosen = next(most for _, most in glm.pairs if most)
    before, after = (glm.operations(chosen * many) - glm.operations(chosen) for many in (0.5, 2))
    assert 0 < after < -before  # beyond, only the indexer looks further


PUBLISHED = [
    # model, adapters, recomputed, tokens, GPU, GPUs, seconds of a micro-batch (facts in docs/planning.md)
    ("Qwen/Qwen3-0.6B", False, 16384, "H100", 1, 1.38),
    ("Qwen/Qwen3-0.6B", False, 65536, "H100", 1, 6.57),
    ("Qwen/Qwen3-0.6B", True, 16384, "H100", 1, 1.23),
    ("Qwen/Qwen3-0.6B", True, 65536, "H100", 1, 6.70),
    ("Qwen/Qwen3-0.6B", False, 8192, "H100", 1, 0.32),
    ("Qwen/Qwen3-4B", False, 16384, "H200", 8, 4.78),
    ("Qwen/Qwen3-4B", True, 16384, "H200", 8, 2.50),
    ("Qwen/Qwen3-4B", True, 65536, "H200", 8, 15.68),
    ("Qwen/Qwen3-4B", True, 16384, "H100", 1, 2.63),
    ("Qwen/Qwen3-4B", True, 16384, "H100", 1, 2.75),
    ("Qwen/Qwen3-4B", False, 16384, "H200", 8, 2.47),
    ("Qwen/Qwen3-30B-A3B", True, 65536, "H200", 8, 21.48),
    ("Qwen/Qwen3-30B-A3B", False, 16384, "H200", 8, 3.74),
    ("zai-org/GLM-4.5-Air", True, 16384, "H200", 8, 7.85),
]


RECOMPUTING = Trainer(activation_checkpointing="full")
ADAPTING = Trainer(activation_checkpointing="full", lora=Lora())


def test_passes():
    assert Passes.of(Trainer()) == Passes(3.0, 3.0)
    assert Passes.of(RECOMPUTING) == Passes(4.0, 4.0)
    assert Passes.of(ADAPTING) == Passes(3.0, 4.0)
    parts = SelectiveCheckpointing(type="selective", parts=["mlp"])
    assert Passes.of(Trainer(activation_checkpointing=parts)) == Passes(3.5, 3.5)


def ranks(degrees, gpu="H200", tokens=16384, trainer=RECOMPUTING, per_node=8, gathered_twice=True):
    return Ranks(degrees, per_node, accelerator_of(gpu), tokens, Passes.of(trainer), gathered_twice)


@pytest.mark.parametrize(("name", "lora", "tokens", "gpu", "count", "seconds"), PUBLISHED)
def test_training_within_a_factor_of_two_of_what_was_measured(name, lora, tokens, gpu, count, seconds):
    does = ranks(Degrees(count, shard=count), gpu, tokens, ADAPTING if lora else RECOMPUTING)
    told = steptime.training_seconds(work(name), does, Lengths(0, tokens, tokens), count)
    assert 0.5 < told / seconds < 2


def test_what_is_offloaded_crosses_the_bus_and_is_stepped_by_cores():
    small, lengths = work("Qwen/Qwen3-4B"), Lengths(0, 100, 100)
    at_home, away = (
        steptime.training_seconds(small, replace(ranks(Degrees(4, shard=4)), offloaded=offloaded), lengths, 4)
        for offloaded in (False, True)
    )
    share = small.weights / 4
    moved = 8 * share / steptime.BUS + share / steptime.HOST_STEP
    exchanged = small.weights * 8 / (450 * GB * steptime.NETWORK)
    assert at_home == pytest.approx(exchanged, rel=0.01) and away == pytest.approx(
        exchanged + moved, rel=0.01
    )
    adapters = replace(ranks(Degrees(4, shard=4), trainer=ADAPTING), offloaded=True, adapters=True)
    assert steptime.training_seconds(small, adapters, lengths, 4) == pytest.approx(
        exchanged + 8 * share / steptime.BUS, rel=0.01
    )


def test_weights_that_cross_the_network_can_take_longer_than_the_arithmetic():
    """Layers are gathered over slow lines for every micro-batch, so short batches wait for them."""
    glm, short = work("zai-org/GLM-5"), Lengths(128, 128, 128)
    across = steptime.training_seconds(glm, ranks(Degrees(64, shard=64)), short, 64)
    sharing = steptime.training_seconds(glm, ranks(Degrees(64, shard=64, expert=8)), short, 64)
    within = steptime.training_seconds(glm, ranks(Degrees(64, shard=64), per_node=64), short, 64)
    assert across == pytest.approx(glm.weights * 8 / (50 * GB * steptime.NETWORK), rel=0.01)
    assert sharing < across / 5 and within == pytest.approx(across * 50 / 450)
    once = ranks(Degrees(64, shard=64), gathered_twice=False)
    assert steptime.training_seconds(glm, once, short, 64) == pytest.approx(across * 6 / 8)


def pool(gpu="H100", number=1, gpus=1, cache_gb=40.0, bytes_per_token=131072, weight_bytes=2.0, requests=256):
    tokens = int(cache_gb * GB / bytes_per_token)
    cache = Cache(bytes_per_token, tokens, tokens // 4096)
    return Engines(number, gpus, accelerator_of(gpu), cache, weight_bytes, requests)


def test_decoding_is_bound_by_memory():
    llama = work("meta-llama/Llama-3.1-8B")
    alone = steptime.iteration_seconds(llama, pool(), 1, 1000)
    read = (2 * llama.common + 1000 * 131072) / (3.35e12 * steptime.READING)
    assert alone == pytest.approx(read + steptime.ITERATION_SECONDS)
    assert 256 / steptime.iteration_seconds(llama, pool(), 256, 1000) == pytest.approx(9000, rel=0.1)
    assert steptime.iteration_seconds(llama, pool(weight_bytes=1.0), 1, 1000) < 0.7 * alone
    two = steptime.iteration_seconds(llama, pool(gpus=2), 1, 1000)
    assert read / 2 < two < alone


def test_requests_that_run_at_once_fit_the_cache_and_the_limit():
    llama, lengths = work("meta-llama/Llama-3.1-8B"), Lengths(1000, 2000, 4000)

    def seconds(**changes):
        return steptime.decoding_seconds(llama, pool(**changes), lengths, 512, 1024)

    assert seconds(cache_gb=10) > 1.5 * seconds(cache_gb=40)
    assert seconds(requests=16) > 3 * seconds(requests=128)
    assert seconds(number=4) < 0.35 * seconds()
    few = steptime.decoding_seconds(llama, pool(number=64), lengths, 64, 64)
    assert few == pytest.approx(2000 * steptime.iteration_seconds(llama, pool(), 1, 2000))


def test_weight_transfer():
    """verl: 8.25 GB/s for Qwen3-30B-A3B over 400 Gb/s."""
    mixture = work("Qwen/Qwen3-30B-A3B")
    seconds = steptime.transfer_seconds(mixture, "collective", 4, 50 * GB)
    assert 2 * mixture.weights / seconds == pytest.approx(8.25 * GB, rel=0.05)
    assert steptime.transfer_seconds(mixture, "collective", 8, 50 * GB) == seconds
    few, many = (steptime.transfer_seconds(mixture, "pull", workers, 50 * GB) for workers in (8, 800))
    assert few == pytest.approx(2 * mixture.weights / steptime.PULLED)
    assert many == pytest.approx(800 * 2 * mixture.weights / (50 * GB * steptime.NETWORK))
    assert steptime.transfer_seconds(mixture, "folder", 8, 50 * GB) == pytest.approx(122, rel=0.01)


def test_who_waits():
    beside = StepTime(generation=30.0, training=40.0, transfer=2.0, overlapping=True)
    assert beside.seconds == 40.0
    assert beside.waiting == {"trainer": 0.0, "engines": pytest.approx(0.2)}
    assert beside.slower == ("trainer", pytest.approx(40 / 32))
    starved = StepTime(generation=90.0, training=40.0, transfer=10.0, overlapping=True)
    assert starved.slower == ("engines", 2.5)
    in_turn = StepTime(generation=30.0, training=40.0, transfer=2.0, overlapping=False)
    assert in_turn.seconds == 72.0 and in_turn.slower[1] == 1.0
    assert in_turn.waiting == {"trainer": pytest.approx(32 / 72), "engines": pytest.approx(40 / 72)}
    assert StepTime(0.0, 5.0, 0.0, overlapping=False).waiting == {"trainer": 0.0}
