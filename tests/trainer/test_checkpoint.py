"""The trainer's part of a checkpoint, in one process: what is restored goes on as if nothing had happened."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from trainer_runs import make_batches, make_samples, make_stack

from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.trainer import checkpoint
from stackrl.runtime.trainer.checkpoint import stored_progress
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.protocol import Progress
from stackrl.runtime.trainer.stored import ChangedError
from stackrl.runtime.transport.messages import Batch
from stackrl.schemas.stack import Stack

STACK = make_stack()


def learner(model: Path, mesh: Meshes, stack: Stack = STACK) -> Learner:
    return Learner(stack, build(model, stack.trainer, "float32", mesh))


def batch(index: int) -> Batch:
    """The steps of STACK: two supervised, then RL."""
    supervised = index < 2
    stage = (
        {"stage": "warmup", "stage_step": index} if supervised else {"stage": "main", "stage_step": index - 2}
    )
    return make_batches(make_samples(8, seed=index), index=index, step=max(0, index - 2), **stage)[0]


def save(trained: Learner, path: Path) -> None:
    """And wait until it is on disk."""
    trained.save(path, {}, lambda: None)
    trained.settle()


def weights(trained: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gathered(trained.model, torch.float32)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_restored_learner_goes_on_exactly(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    first = learner(model, mesh)
    for index in range(4):
        first.apply(batch(index))
    save(first, tmp_path)
    assert stored_progress(tmp_path) == first.progress == Progress(index=4, step=2, stage="main")
    saved = weights(first)
    went_on = [first.apply(batch(index)) for index in (4, 5)]

    second = learner(model, mesh)
    second.restore(tmp_path)
    assert second.progress == Progress(index=4, step=2, stage="main")
    assert equal(weights(second), saved)
    assert [second.apply(batch(index)) for index in (4, 5)] == went_on
    assert equal(weights(second), weights(first)) and not equal(weights(second), saved)


def test_the_optimizers_settings_are_the_stacks_and_its_moments_the_checkpoints(
    model: Path, mesh: Meshes, tmp_path: Path
) -> None:
    first = learner(model, mesh)
    for index in range(4):
        first.apply(batch(index))
    save(first, tmp_path)
    changed = {"betas": (0.5, 0.6), "epsilon": 0.125, "weight_decay": 0.25}
    stack = make_stack(trainer={"optimizer": STACK.trainer.optimizer.model_dump() | changed})
    second = learner(model, mesh, stack)
    second.restore(tmp_path)
    groups = second._optimizer.param_groups
    assert [(group["betas"], group["eps"]) for group in groups] == [((0.5, 0.6), 0.125)] * 2
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0], "vectors do not decay"
    before, after = (trained._optimizer.state.values() for trained in (first, second))
    for old, new in zip(before, after, strict=True):
        assert new["step"] == old["step"] == 2 and torch.equal(new["exp_avg"], old["exp_avg"])
    assert first.apply(batch(4)).metrics == second.apply(batch(4)).metrics
    assert not equal(weights(first), weights(second)), "the step is taken with the settings of the stack"


def test_every_stage_starts_a_fresh_optimizer(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    """Going on from a checkpoint at the end of a stage equals going on without one."""
    first = learner(model, mesh)
    first.apply(batch(0))
    first.apply(batch(1))
    save(first, tmp_path)
    went_on = first.apply(batch(2))
    steps = {float(state["step"]) for state in first._optimizer.state.values()}
    assert steps == {1.0}

    second = learner(model, mesh)
    second.restore(tmp_path)
    assert second.progress.stage == "warmup"
    assert second.apply(batch(2)) == went_on


def test_rates_follow_the_schedule_of_the_stage(model: Path, mesh: Meshes) -> None:
    trained = learner(model, mesh)
    rates = [trained.apply(batch(index)).metrics["learning_rate"] for index in range(6)]
    assert rates[:5] == [0.0005, 0.001, 0.0005, 0.001, 0.001]
    assert 0 < rates[5] < 0.001


def test_demonstrations_are_not_compared_with_an_engine(model: Path, mesh: Meshes) -> None:
    trained = learner(model, mesh)
    supervised, rl = trained.apply(batch(1)).metrics, trained.apply(batch(2)).metrics
    assert rl.keys() - supervised.keys() == {"mismatch_kl", "capped", "ratio_max"}


def test_a_second_save_replaces_an_unfinished_one(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__9_0.distcp").write_bytes(b"of more ranks")
    trained = learner(model, mesh)
    trained.apply(batch(0))
    save(trained, tmp_path)
    assert not (tmp_path / "trainer" / "__9_0.distcp").exists()


class Held:
    """Keeps writers of weights from going on, and says that one has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()
        write = checkpoint.dcp.save

        def late(*arguments, **options):
            self.arrived.set()
            assert self.go.wait(60)
            return write(*arguments, **options)

        monkeypatch.setattr(checkpoint.dcp, "save", late)


def test_what_is_saved_is_of_the_moment_and_training_goes_on_meanwhile(
    model: Path, mesh: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, done = learner(model, mesh), threading.Event()
    for index in range(3):
        first.apply(batch(index))
    before, progress = weights(first), first.progress
    held = Held(monkeypatch)
    first.save(tmp_path, {"ledger-0.jsonl": b"evidence"}, done.set)
    assert held.arrived.wait(60)
    went_on = [first.apply(batch(index)) for index in (3, 4)]
    assert not done.is_set() and not (tmp_path / "trainer").exists()
    held.go.set()
    first.settle()
    assert done.is_set() and (tmp_path / "trainer/ledger-0.jsonl").read_bytes() == b"evidence"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trainer"]

    second = learner(model, mesh)
    second.restore(tmp_path)
    assert second.progress == progress and equal(weights(second), before)
    assert [second.apply(batch(index)) for index in (3, 4)] == went_on


def test_a_second_save_waits_for_the_first(
    model: Path, mesh: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, finished = learner(model, mesh), []
    trained.apply(batch(0))
    held = Held(monkeypatch)
    trained.save(tmp_path / "1", {}, lambda: finished.append(1))
    trained.apply(batch(1))
    threading.Timer(0.5, held.go.set).start()
    trained.save(tmp_path / "2", {}, lambda: finished.append(2))
    assert finished[:1] == [1]
    trained.settle()
    assert finished == [1, 2]
    assert [stored_progress(tmp_path / name).index for name in "12"] == [1, 2]


def test_the_limit_of_writing_names_rank_and_checkpoint(
    model: Path, mesh: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = learner(model, mesh)
    trained.apply(batch(0))
    held = Held(monkeypatch)
    trained.save(tmp_path, {}, lambda: None)
    with pytest.raises(CheckpointError, match=f"trainer rank 0 did not finish writing {tmp_path} within 0 s"):
        trained._saver.settle(limit=0.1)
    held.go.set()
    trained.settle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_writer_is_raised_with_its_place(
    model: Path, mesh: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    trained, done = learner(model, mesh), threading.Event()
    trained.apply(batch(0))
    monkeypatch.setattr(checkpoint, "write_durably", full)
    trained.save(tmp_path / "step-000001", {}, done.set)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*step-000001: .*No space left"):
        trained.settle()
    assert not done.is_set() and not (tmp_path / "step-000001/trainer").exists()


def test_random_states_are_those_of_the_moment(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    trained = learner(model, mesh)
    trained.apply(batch(0))
    torch.manual_seed(11)
    save(trained, tmp_path)
    drawn = torch.rand(3)
    torch.manual_seed(12)
    trained.restore(tmp_path)
    assert torch.equal(torch.rand(3), drawn)


def test_files_that_cannot_be_read_are_named(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    trained = learner(model, mesh)
    trained.apply(batch(0))
    save(trained, tmp_path)
    (shard,) = (tmp_path / "trainer").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"cannot load {tmp_path}/trainer: trainer rank 0"):
        trained.restore(tmp_path)
    (tmp_path / "trainer/.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/trainer cannot be read"):
        trained.restore(tmp_path)


def with_optimizer(**changes: object) -> Stack:
    return make_stack(trainer={"optimizer": {"learning_rate": 1e-3} | changes})


OTHERS = {
    "adamw": {"type": "adamw"},
    "muon": {"type": "muon"},
    "sgd": {"type": "sgd"},
    "signsgd, or of sgd without momentum": {"type": "signsgd"},
}


@pytest.mark.parametrize("before", OTHERS)
def test_a_checkpoint_of_another_optimizer_says_what_to_type(
    model: Path, mesh: Meshes, tmp_path: Path, before: str
) -> None:
    trained = learner(model, mesh, with_optimizer(**OTHERS[before]))
    trained.apply(batch(0))
    save(trained, tmp_path)
    weights_then = weights(trained)
    again = learner(model, mesh, with_optimizer(**OTHERS[before]))
    again.restore(tmp_path)
    assert equal(weights(again), weights_then)
    typed = f"`--set trainer.optimizer.type={before}`" if before.isalpha() else "trainer.optimizer "
    for now in OTHERS.keys() - {before}:
        other = learner(model, mesh, with_optimizer(**OTHERS[now]))
        words = (
            f"holds the optimizer state of {before}, and the stack asks for {now}: put it back with {typed}"
        )
        with pytest.raises(ChangedError, match=f"{tmp_path}/trainer {words}"):
            other.restore(tmp_path)


def test_a_checkpoint_of_other_parameters_is_named(model: Path, mesh: Meshes, tmp_path: Path) -> None:
    trained = learner(model, mesh)
    trained.apply(batch(0))
    save(trained, tmp_path)
    frozen = learner(model, mesh)
    frozen.model.model.norm.weight.requires_grad_(False)
    with pytest.raises(ChangedError, match=r"other parameters than are trained now, such as model\.norm"):
        frozen.restore(tmp_path)
    adapted = learner(model, mesh, make_stack(trainer={"lora": {"rank": 4}}))
    with pytest.raises(ChangedError, match=r"has no adapters: trainer\.lora was changed since"):
        adapted.restore(tmp_path)
    adapted.apply(batch(0))
    save(adapted, tmp_path / "adapted")
    with pytest.raises(ChangedError, match=r"has adapters: trainer\.lora was changed since"):
        learner(model, mesh).restore(tmp_path / "adapted")
