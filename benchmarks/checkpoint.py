"""How long does a checkpoint hold training up? Written behind the steps, against waited for.

    python benchmarks/checkpoint.py [--hidden 512] [--layers 8] [--rounds 5] [--device cpu] [--folder DIR]

One rank trains a random model of that size and saves it after every few steps. "held up" is the time from
the end of a step until the next one may begin: with `asynchronous` a copy in host memory is made, with
`synchronous` training waits until everything is on disk. "beside a save" is a step while the writing thread
is at work. The last line is the ratio of the medians, synchronous over asynchronous.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.models.prepare import prepare
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.transport.messages import Batch, MicroBatch
from stackrl.schemas.stack import Stack

TOKENS = 512
"""Of a step's batch."""
STEPS_BETWEEN = 3


@dataclass
class Times:
    """Seconds."""

    held_up: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints of each kind")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    options = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        learner = make_learner(Path(folder), options)
        size = sum(parameter.numel() for parameter in learner.model.parameters())
        print(f"{size / 1e6:.0f} million weights, {12 * size / 2**20:.0f} MiB with the optimizer's state")
        learner.apply(batch(0))
        measure(learner, Path(folder) / "first", rounds=1, wait=False)  # memory is touched for the first time
        times = {
            name: measure(learner, Path(folder) / name, options.rounds, wait)
            for name, wait in (("synchronous", True), ("asynchronous", False))
        }
    dist.destroy_process_group()
    print(f"{'':>14} {'held up':>9} {'beside a save':>14} {'step alone':>11}   (median seconds)")
    for name, found in times.items():
        beside = f"{median(found.beside):.3f}" if found.beside else "-"
        print(f"{name:>14} {median(found.held_up):>9.3f} {beside:>14} {median(found.alone):>11.3f}")
    ratio = median(times["synchronous"].held_up) / median(times["asynchronous"].held_up)
    print(f"a step is held up {ratio:.1f} times as long when it waits for the disk")


def make_learner(folder: Path, options: argparse.Namespace) -> Learner:
    """A random model of the size that was asked for."""
    config = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
        "head_dim": 64,
    }
    stack = Stack.model_validate(
        {
            "version": 1,
            "device": options.device,
            "model": {"init": "random", "architecture": "qwen3", "config": config},
            "roles": {"trainer": {"processes": 1}},
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [{"name": "main", "type": "supervised", "steps": 10_000}],
        }
    )
    run = RunFolder(folder)
    run.write_plan(stack, {})
    prepare(run)
    mesh = init_device_mesh(options.device, (1,))
    return Learner(stack, build(run.model, stack.trainer, "float32", mesh))


def measure(learner: Learner, folder: Path, rounds: int, wait: bool) -> Times:
    """Save and step in turns; with ``wait`` until the checkpoint is on disk."""
    times, written = Times(), []
    for number in range(rounds):
        began = time.perf_counter()
        learner.save(folder / str(number), {}, lambda: written.append(time.perf_counter()))
        if wait:
            learner.settle()
        times.held_up.append(time.perf_counter() - began)
        for _ in range(STEPS_BETWEEN):
            began = time.perf_counter()
            learner.apply(batch(learner.progress.index))
            beside = len(written) <= number
            (times.beside if beside else times.alone).append(time.perf_counter() - began)
        learner.settle()  # else a slow disk would hold up the next save
        began = time.perf_counter()
        learner.apply(batch(learner.progress.index))
        times.alone.append(time.perf_counter() - began)
    return times


def batch(index: int) -> Batch:
    """One document of random tokens, all of them trained but the first."""
    random = np.random.default_rng(index)
    mask = np.ones(TOKENS, "|u1")
    mask[0] = 0
    micro = MicroBatch(
        tokens=random.integers(0, 256, TOKENS).astype("<i4"),
        lengths=np.array([TOKENS], "<i4"),
        loss_mask=mask,
        logprobs=np.zeros(TOKENS, "<f4"),
        advantages=np.ones(1, "<f4"),
        temperatures=np.ones(1, "<f4"),
        documents=["demonstration"],
    )
    return Batch(
        incarnation=1,
        index=index,
        step=0,
        stage="main",
        stage_step=index,
        rank=0,
        ranks=1,
        tokens=TOKENS - 1,
        sequences=1,
        checkpoint=False,
        last_of_stage=False,
        micro_batches=[micro],
    )


if __name__ == "__main__":
    main()
