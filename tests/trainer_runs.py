"""Small models, batches and runs for tests of the trainer, with a served list of batches as orchestrator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from forked import Started, Starter

from stackrl.runtime import checkpoints, trainer
from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.runtime.orchestrator.packing import causal_cost
from stackrl.runtime.run import Endpoints, RunFolder, State
from stackrl.runtime.transport.batches import BatchServer
from stackrl.runtime.transport.messages import Ack, Batch, End, Sample
from stackrl.schemas.stack import Stack

HERE = Path(__file__).parent
TOKEN = "test-token"
LIMIT = 240.0

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def make_stack(**changes: Any) -> Stack:
    """Two supervised steps, then RL, for a tiny model."""
    return Stack.model_validate(
        {
            "version": 1,
            "device": "cpu",
            "model": {"init": "random", "architecture": "qwen3", "config": TINY},
            "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
            "trainer": {
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "schedule": {"type": "linear"}}
            },
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [
                {"name": "warmup", "type": "supervised", "steps": 2},
                {"name": "main", "type": "rl", "steps": 20},
            ],
        }
        | changes
    )


def make_run(path: Path, stack: Stack, incarnation: int = 1) -> RunFolder:
    """A run folder as the node program leaves it before the roles start, without the model."""
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(path)
    run.write_plan(stack, {})
    ports = free_ports(3)
    run.write("endpoints.json", asdict(endpoints(*ports)))
    run.write_state(State(incarnation=incarnation))
    return run


def endpoints(orchestrator: int, weights: int, rendezvous: int) -> Endpoints:
    url = "http://127.0.0.1:{}".format
    return Endpoints(url(orchestrator), url(weights), [], f"127.0.0.1:{rendezvous}")


def make_samples(count: int, seed: int, vocabulary: int = 262) -> list[Sample]:
    """Documents of 8 to 40 tokens whose last third is trained, with plausible logprobs and advantages."""
    rng = np.random.default_rng(seed)
    return [_sample(rng, i, vocabulary) for i in range(count)]


def _sample(rng: np.random.Generator, number: int, vocabulary: int) -> Sample:
    length = int(rng.integers(8, 40))
    mask = np.zeros(length, "|u1")
    mask[length - length // 3 :] = 1
    logprobs = np.where(mask, rng.normal(-np.log(vocabulary), 0.5, length), 0).astype("<f4")
    return Sample(
        rollout=f"r{number}",
        group=number // 4,
        environment="reverse",
        tokens=rng.integers(0, vocabulary, length).astype("<i4"),
        loss_mask=mask,
        logprobs=logprobs,
        advantage=float(rng.normal()),
        temperature=float(rng.choice([0.7, 1.0])),
    )


def make_batches(
    samples: Sequence[Sample], ranks: int = 1, capacity: int = 4096, *, context: int = 1, **place: Any
) -> list[Batch]:
    """One optimizer step's batches, packed as the orchestrator packs them."""
    defaults = {
        "incarnation": 1,
        "index": 0,
        "step": 0,
        "stage": "main",
        "stage_step": 0,
        "checkpoint": False,
        "last_of_stage": False,
    }
    return build(samples, Place(**defaults | place), Layout(capacity, ranks, causal_cost(64), context))


def run_steps(
    run: RunFolder,
    ranks: int,
    steps: Sequence[list[Batch]],
    *,
    first: int = 0,
    reason: str = "finished",
    save: bool = False,
    look: Callable[[Ack], None] = lambda ack: None,
) -> list[Ack]:
    """Start ``ranks`` trainer processes on ``run`` and serve them ``steps``; returns the `applied` acks.

    ``look`` is called with each of them while the trainer waits for the next batch. ``save``: at the end the
    trainer writes a checkpoint.
    """
    processes = [start_rank(run, rank, ranks) for rank in range(ranks)]
    try:
        return asyncio.run(_serve(run, steps, first, End(reason=reason, save=save), look, processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


@cache
def _starter() -> Starter:
    return Starter(HERE, "stackrl.runtime.trainer.run", "torch._dynamo")


def start_rank(run: RunFolder, rank: int, ranks: int) -> Started:
    """A rank's process; it goes without the seconds in which torch is imported."""
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "STACKRL_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
    }
    program = [str(Path(trainer.__file__).with_name("__main__.py")), str(run.path)]
    return _starter().start(program, environment, (run.path / f"trainer-{rank}.log").open("a+"))


async def _serve(
    run: RunFolder,
    steps: Sequence[list[Batch]],
    first: int,
    end: End,
    look: Callable[[Ack], None],
    processes: Sequence[Started],
) -> list[Ack]:
    incarnation = run.state().incarnation
    server = BatchServer(run.endpoints().orchestrator, TOKEN, incarnation=incarnation, index=first)
    await server.start()
    watch = asyncio.create_task(_alive(run, processes))
    work = asyncio.create_task(_converse(run, server, steps, end, look))
    try:
        await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not work.done():
            watch.result()
        acks = await work
        watch.cancel()
        await asyncio.to_thread(_all_end_well, run, processes)
        return acks
    finally:
        watch.cancel()
        work.cancel()
        await server.close()


async def _converse(
    run: RunFolder,
    server: BatchServer,
    steps: Sequence[list[Batch]],
    end: End,
    look: Callable[[Ack], None],
) -> list[Ack]:
    await server.hello(LIMIT)
    acks = []
    for batches in steps:
        await server.offer(batches)
        await server.fetched(LIMIT)
        acks.append(await server.applied(LIMIT))
        await asyncio.to_thread(look, acks[-1])
        if batches[0].checkpoint:
            await server.durable(batches[0].index, LIMIT)
            folder = checkpoints.folder(run.checkpoints(run.stack()), batches[0].index + 1)
            checkpoints.write_manifest(folder, {"index": batches[0].index + 1})
    await server.end(end.reason, LIMIT, save=end.save)
    if end.save:
        await server.durable(acks[-1].index, LIMIT)
    return acks


async def _alive(run: RunFolder, processes: Sequence[Started]) -> None:
    while True:
        if any(process.poll() for process in processes):
            raise AssertionError(f"a trainer rank failed:\n{logs(run)}")
        await asyncio.sleep(0.2)


def _all_end_well(run: RunFolder, processes: Sequence[Started]) -> None:
    codes = [process.wait(60) for process in processes]
    assert not any(codes), logs(run)


def logs(run: RunFolder) -> str:
    return "\n".join(file.read_text()[-4000:] for file in sorted(run.path.glob("trainer-*.log")))
