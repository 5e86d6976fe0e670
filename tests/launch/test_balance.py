"""Which side of a run waits, and which split of the same machines would be faster."""

from __future__ import annotations

import pytest

import stacks
from stackrl.runtime.launch.planning.balance import NotEstimated, estimate
from stackrl.runtime.launch.planning.memory import memory_of
from stackrl.schemas import split
from stackrl.schemas.loader import load

MODEL = (
    "{init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}}",
    "{id: Qwen/Qwen3-4B}",
)
MUCH = ("batch_size: 64", "batch_size: 2048")
"""So much work that the way of the weights to the engines hardly counts."""
LENGTHS = (
    ("sampling: {max_tokens: 9}", "sampling: {max_tokens: 3000}"),
    ("    algorithm:\n", "    trainer: {activation_checkpointing: full}\n    algorithm:\n"),
)


HALVES = "{trainer: {gpus: 4}, inference: {gpus: rest}}"


def stack_of(folder, roles=HALVES, *changes, gpus=8, more=""):
    return load(stacks.write(folder, *stacks.gpus(gpus, roles, more), MODEL, *LENGTHS, *changes))


def estimated(loaded, accelerator="H100", reply=None):
    stack, task = loaded.stack, loaded.task
    accelerators = dict.fromkeys((name for name, _ in split.roles_of(stack)), accelerator)
    return estimate(stack, task, accelerators, memory_of(stack, task, accelerator or None), reply)


def seconds_with(folder, trainer: int) -> float:
    return estimated(
        stack_of(folder, f"{{trainer: {{gpus: {trainer}}}, inference: {{gpus: rest}}}}")
    ).step.seconds


def test_the_better_split_is_the_fastest_of_all(tmp_path):
    times = {trainer: seconds_with(tmp_path, trainer) for trainer in range(1, 8)}
    worst, best = max(times, key=times.get), min(times, key=times.get)
    roles = f"{{trainer: {{gpus: {worst}}}, inference: {{gpus: rest}}}}"
    found = estimated(stack_of(tmp_path, roles)).better
    assert (found.unit, found.counts) == ("gpus", {"trainer": best, "inference": 8 - best})
    assert found.seconds == times[best]
    assert estimated(stack_of(tmp_path, str(found).join("{}"))).better is None
    assert str(found) == f"trainer: {{gpus: {best}}}, inference: {{gpus: {8 - best}}}"


def test_a_trainer_that_would_not_fit_is_not_named(tmp_path):
    """Eight billion weights, their gradients and moments take six GPUs of 24 GB."""
    large = (MODEL[1], "{id: Qwen/Qwen3-8B}")
    loaded = stack_of(tmp_path, "{trainer: {gpus: 7}, inference: {gpus: 1}}", large)
    assert estimated(loaded, "H100", reply=2900).better.counts["trainer"] < 6
    found = estimated(loaded, "RTX4090", reply=2900).better
    assert found is None or found.counts["trainer"] >= 6


def test_other_splits_keep_to_the_degrees(tmp_path):
    """Of the trainer, and of engines that have two GPUs each."""
    context = ("trainer: {activation", "trainer: {parallel: {context: 4}, activation")
    halves = stack_of(tmp_path, "{trainer: {gpus: 4}, inference: {gpus: rest}}", context, MUCH, gpus=16)
    found = estimated(halves, reply=600).better
    assert found is not None and found.counts["trainer"] in (8, 12)
    wide = stack_of(tmp_path, "{trainer: {gpus: 2}, inference: {gpus: rest}}", MUCH, more=WIDE)
    found = estimated(wide, reply=300).better
    assert found is not None and found.counts["inference"] in (2, 4)


WIDE = "    inference: {tensor_parallel: 2}\n"


def test_pools_of_prefill_and_decode_keep_their_proportion(tmp_path):
    roles = "{trainer: {gpus: 9}, prefill: {gpus: 2}, decode: {gpus: 5}}"
    found = estimated(stack_of(tmp_path, roles, MUCH, gpus=16), reply=2500).better
    assert found is not None and sum(found.counts.values()) == 16
    assert 1 <= found.counts["prefill"] < found.counts["decode"]


SHARED = "{trainer: {gpus: 1}, inference: {share: trainer, engine_memory: 12GiB}}"


def test_a_shared_gpu_is_used_in_turn(tmp_path):
    small = (MODEL[1], "{id: Qwen/Qwen3-0.6B}")
    found = estimated(stack_of(tmp_path, SHARED, small, gpus=1), "H100")
    assert not found.step.overlapping and found.better is None
    assert found.step.seconds == pytest.approx(found.step.engines + found.step.training)


def test_without_staleness_nobody_works_ahead(tmp_path):
    few = ("batch_size: 64", "batch_size: 8")
    turns = ("batch_size: 64", "batch_size: 8\n      max_staleness: 0")
    ahead, in_turn = (estimated(stack_of(tmp_path, HALVES, change)) for change in (few, turns))
    assert ahead.step.overlapping and not in_turn.step.overlapping
    assert in_turn.step.seconds > ahead.step.seconds
    assert in_turn.step.generation > 3 * ahead.step.generation  # the longest reply is waited for


def test_more_of_what_waits_is_slower_than_more_of_what_works(tmp_path):
    """Faster GPUs, fewer tokens: less time."""
    base = estimated(stack_of(tmp_path)).step
    assert estimated(stack_of(tmp_path), "B200").step.seconds < base.seconds
    assert estimated(stack_of(tmp_path), reply=100).step.seconds < base.seconds
    assert estimated(stack_of(tmp_path)).lengths.reply == 1500


def test_lengths(tmp_path):
    """One turn: half the longest reply. Several turns: half of what an engine holds, half of it sampled."""
    one = estimated(stack_of(tmp_path)).lengths
    assert (one.prompt, one.reply, one.longest) == (512, 1500, 3000)
    turns = (
        "type: reverse_text, args: {letters: [3, 6]}",
        "type: reverse_text_tries, args: {letters: [3, 6]}",
    )
    several = estimated(stack_of(tmp_path, HALVES, turns)).lengths
    assert (several.prompt, several.reply, several.whole) == (1024, 1024, 2048)


def test_a_stack_that_only_imitates_is_timed_too(tmp_path):
    only = "      - {name: warmup, type: supervised, steps: 20, clean_steps: 10}\n"
    loaded = load(
        stacks.write(
            tmp_path,
            *stacks.gpus(8, "{trainer: {gpus: 8}}"),
            MODEL,
            (only + "      - {name: main, type: rl, steps: 5}\n", only),
            LENGTHS[1],
        )
    )
    found = estimated(loaded)
    assert (found.stage, found.step.generation, found.step.waiting) == ("warmup", 0.0, {"trainer": 0.0})
    assert found.step.training > 0 and found.better is None


def test_what_cannot_be_estimated_says_why(tmp_path):
    with pytest.raises(NotEstimated, match="a GPU called TPUv9"):
        estimated(stack_of(tmp_path), "TPUv9")
    with pytest.raises(NotEstimated, match="without GPUs"):
        estimated(load(stacks.write(tmp_path)), "")
    unknown = load(
        stacks.write(
            tmp_path,
            *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 4}}"),
            (MODEL[0], "{id: nobody/nothing}"),
        )
    )
    with pytest.raises(NotEstimated, match="what the model is made of"):
        estimated(unknown)
