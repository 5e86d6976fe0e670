"""The trainer's part of a checkpoint, in one process: what is restored goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from trainer_runs import make_batches, make_samples, make_stack

from stackrl.runtime.trainer.checkpoint import Progress, stored_progress
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.transport.messages import Batch

STACK = make_stack()


def learner(model: Path, mesh: DeviceMesh) -> Learner:
    return Learner(STACK, build(model, STACK.trainer, "float32", mesh))


def batch(index: int) -> Batch:
    """The steps of STACK: two supervised, then RL."""
    supervised = index < 2
    stage = (
        {"stage": "warmup", "stage_step": index} if supervised else {"stage": "main", "stage_step": index - 2}
    )
    return make_batches(make_samples(8, seed=index), index=index, step=max(0, index - 2), **stage)[0]


def weights(trained: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gathered(trained.model, torch.float32)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_restored_learner_goes_on_exactly(model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    first = learner(model, mesh)
    for index in range(4):
        first.apply(batch(index))
    first.save(tmp_path)
    assert stored_progress(tmp_path) == first.progress == Progress(index=4, step=2, stage="main")
    saved = weights(first)
    went_on = [first.apply(batch(index)) for index in (4, 5)]

    second = learner(model, mesh)
    second.restore(tmp_path)
    assert second.progress == Progress(index=4, step=2, stage="main")
    assert equal(weights(second), saved)
    assert [second.apply(batch(index)) for index in (4, 5)] == went_on
    assert equal(weights(second), weights(first)) and not equal(weights(second), saved)


def test_every_stage_starts_a_fresh_optimizer(model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Going on from a checkpoint at the end of a stage equals going on without one."""
    first = learner(model, mesh)
    first.apply(batch(0))
    first.apply(batch(1))
    first.save(tmp_path)
    went_on = first.apply(batch(2))
    steps = {float(state["step"]) for state in first._optimizer.state.values()}
    assert steps == {1.0}

    second = learner(model, mesh)
    second.restore(tmp_path)
    assert second.progress.stage == "warmup"
    assert second.apply(batch(2)) == went_on


def test_rates_follow_the_schedule_of_the_stage(model: Path, mesh: DeviceMesh) -> None:
    trained = learner(model, mesh)
    rates = [trained.apply(batch(index))["learning_rate"] for index in range(6)]
    assert rates[:5] == [0.0005, 0.001, 0.0005, 0.001, 0.001]
    assert 0 < rates[5] < 0.001


def test_demonstrations_are_not_compared_with_an_engine(model: Path, mesh: DeviceMesh) -> None:
    trained = learner(model, mesh)
    supervised, rl = trained.apply(batch(1)), trained.apply(batch(2))
    assert rl.keys() - supervised.keys() == {"mismatch_kl", "capped", "ratio_max"}


def test_a_second_save_replaces_an_unfinished_one(model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__9_0.distcp").write_bytes(b"of more ranks")
    trained = learner(model, mesh)
    trained.apply(batch(0))
    trained.save(tmp_path)
    assert not (tmp_path / "trainer" / "__9_0.distcp").exists()
