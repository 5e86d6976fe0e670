"""The trainer's processes on a whole run, with a served list of batches as orchestrator."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopback import free_port
from newest_weights import newest_version
from trainer_runs import (
    LIMIT,
    TOKEN,
    logs,
    make_batches,
    make_run,
    make_samples,
    make_stack,
    run_steps,
    start_rank,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from stackrl.runtime import checkpoints
from stackrl.runtime.run import RunFolder, State
from stackrl.runtime.trainer.checkpoint import stored_progress
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.ledger import read_ledger
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.prepare import prepare
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.transport.batches import BatchServer
from stackrl.runtime.transport.messages import Ack, Batch, Version
from stackrl.runtime.transport.weights import receive

pytestmark = pytest.mark.slow


def steps(
    first: int, last: int, ranks: int, incarnation: int = 1, save: tuple[int, ...] = ()
) -> list[list[Batch]]:
    """Optimizer steps ``first`` to ``last`` (exclusive) of the run: two supervised, then RL."""
    made = []
    for index in range(first, last):
        stage = ("warmup", index) if index < 2 else ("main", index - 2)
        made.append(
            make_batches(
                make_samples(12, seed=index),
                ranks,
                capacity=100,
                incarnation=incarnation,
                index=index,
                step=max(0, index - 2),
                stage=stage[0],
                stage_step=stage[1],
                checkpoint=index in save,
                last_of_stage=index == 1,
            )
        )
    return made


def new_run(path: Path) -> RunFolder:
    run = make_run(path, make_stack())
    prepare(run)
    return run


def restart(run: RunFolder, incarnation: int) -> None:
    """What the node program does before it starts the roles again."""
    fresh = make_run(run.path.parent / f"{run.id}-{incarnation}", run.stack())
    run.write("endpoints.json", fresh.read("endpoints.json"))
    run.write_state(State(incarnation=incarnation))


def test_a_run_publishes_after_warmup_and_each_rl_step_and_leaves_its_model(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    url = run.endpoints().weights
    published: list[Version | None] = []
    received: dict[str, torch.Tensor] = {}

    def look(ack: Ack) -> None:
        published.append(newest_version(url, TOKEN))
        if ack.index == 3:
            received.update(receive(url, ack.version, TOKEN, 10.0))

    acks = run_steps(run, 1, steps(0, 4, ranks=1), look=look)
    assert published == [None, Version(1, 0), Version(1, 1), Version(1, 2)]
    assert [ack.version for ack in acks] == [Version(1, 0), Version(1, 0), Version(1, 1), Version(1, 2)]
    assert {"seconds_step", "seconds_wait", "seconds_publish", "loss"} <= acks[0].metrics.keys()
    model, report = AutoModelForCausalLM.from_pretrained(run.final, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert received.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(received[name], parameter) for name, parameter in model.named_parameters())
    first = AutoModelForCausalLM.from_pretrained(run.model)
    assert not torch.equal(first.lm_head.weight, model.lm_head.weight)
    assert AutoTokenizer.from_pretrained(run.final).chat_template


def test_resumed_on_fewer_and_more_ranks_and_past_a_damaged_checkpoint(tmp_path: Path, mesh: Meshes) -> None:
    run = new_run(tmp_path / "run")
    stack = run.stack()
    straight = Learner(stack, build(run.model, stack.trainer, "float32", mesh))
    expected = [straight.apply(batch).metrics for (batch,) in steps(0, 7, ranks=1)]

    acks = run_steps(run, 2, steps(0, 3, ranks=2, save=(2,)), reason="stopped")
    assert not run.final.exists()
    restart(run, incarnation=2)
    acks += run_steps(run, 1, steps(3, 5, 1, incarnation=2, save=(3, 4)), first=3, reason="stopped")
    assert acks[-1].version == Version(2, 3)

    damaged = checkpoints.folder(run.checkpoints(stack), 5) / "trainer" / "progress.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"5", b"6"))
    restart(run, incarnation=3)
    acks[4:] = run_steps(run, 2, steps(4, 7, 2, incarnation=3), first=4)
    assert f"{damaged} is damaged" in logs(run)

    for index, (metrics, got) in enumerate(zip(expected, acks, strict=True)):
        assert (got.index, got.step) == (index, max(0, index - 2))
        for name in ("loss", "gradient_norm", "learning_rate", "entropy"):
            assert got.metrics[name] == pytest.approx(metrics[name], rel=1e-5), (index, name)
    assert run.final.exists()
    lines = read_ledger(checkpoints.folder(run.checkpoints(stack), 4))
    assert {(line["index"], line["incarnation"]) for line in lines} == {(0, 1), (1, 1), (2, 1), (3, 2)}


def test_an_end_that_asks_for_it_leaves_a_checkpoint_of_that_very_step(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run_steps(run, 2, steps(0, 2, ranks=2), reason="stopped", save=True)
    checkpoint = checkpoints.folder(run.checkpoints(run.stack()), 2)
    assert stored_progress(checkpoint).index == 2
    assert {line["index"] for line in read_ledger(checkpoint)} == {0, 1}
    assert not run.final.exists()


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.checkpoints(run.stack()).write_text("not a folder")
    with pytest.raises(AssertionError, match="a trainer rank failed"):
        run_steps(run, 1, steps(0, 2, ranks=1, save=(0,)), reason="stopped")
    last = logs(run).splitlines()[-1]
    assert last.startswith("error: trainer rank 0 cannot write ") and "step-000001" in last


def test_a_rank_that_loses_another_says_where_and_at_what(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    processes = [start_rank(run, rank, 2) for rank in range(2)]
    try:
        asyncio.run(lose_the_second(run, processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    last = (run.path / "trainer-0.log").read_text().splitlines()[-1]
    assert last.startswith("error: trainer rank 0 of 2 lost another rank"), last
    assert run.endpoints().rendezvous in last and "at: step 1;" in last


async def lose_the_second(run: RunFolder, processes: list[subprocess.Popen[bytes]]) -> None:
    """Rank 0 steps on a batch that rank 1 does not live to see."""
    server = BatchServer(run.endpoints().orchestrator, TOKEN, incarnation=1, index=0)
    await server.start()
    try:
        await server.hello(LIMIT)
        first, second = steps(0, 2, ranks=2)
        await server.offer(first)
        await server.applied(LIMIT)
        processes[1].kill()
        await server.offer(second)
        assert await asyncio.to_thread(processes[0].wait, LIMIT) == 1
    finally:
        await server.close()


def test_a_role_that_fails_says_why_in_its_last_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_stack())
    run.model.mkdir()
    environment = os.environ | {"STACKRL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stackrl.runtime.trainer", str(run.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2  # trying again does not help
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "config.json" in last


def test_no_socket_of_the_trainer_listens_beyond_its_interface(tmp_path: Path) -> None:
    """Its store and gloo; the weight server has a test of its own."""
    code = (
        "import torch.distributed as d, subprocess, os;"
        "from stackrl.runtime.trainer.ranks import Rank, join;"
        f"join(Rank(0, 1, 0), '127.0.0.1:{free_port()}', 'cpu');"
        "print(open('/proc/self/net/tcp').read(), open('/proc/self/net/tcp6').read());"
        "print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if "
        "os.path.exists(f'/proc/self/fd/{n}') or os.path.islink(f'/proc/self/fd/{n}')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    own = {part.partition("]")[0] for part in done.stdout.split("socket:[")[1:]}
    listening = [
        line.split()[1]
        for line in done.stdout.splitlines()
        if len(line.split()) > 9 and line.split()[3] == "0A" and line.split()[9] in own
    ]
    assert listening
    assert all(address.startswith("0100007F:") for address in listening)  # 127.0.0.1
