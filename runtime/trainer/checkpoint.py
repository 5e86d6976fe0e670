"""The trainer's part of a checkpoint: weights, optimizer and random states, and how far training has come.

The format is torch's distributed checkpoint: any number of ranks can load what any other number wrote.
Training waits for a copy in host memory; a thread of each rank brings that to disk, and the part gets its
name when it is whole. runtime/checkpoints.py says when a checkpoint as a whole counts.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from stackrl.runtime.checkpoints import CheckpointError, sync_folder
from stackrl.runtime.run import write_durably
from stackrl.runtime.trainer.ledger import PART
from stackrl.runtime.trainer.protocol import Progress
from stackrl.runtime.trainer.ranks import RanksError, broke_off
from stackrl.runtime.trainer.stored import compare_moments, compare_weights, metadata_of

PARTIAL = f"{PART}.partial"
"""The part while it is written."""
PROGRESS = "progress.json"
WRITE_LIMIT = 7200.0
"""Seconds that all ranks may take to bring one checkpoint to disk."""

State = dict[str, Any]


class Saver:
    """Writes checkpoints behind the optimizer steps, one at a time. All ranks call the same methods together.

    The writing threads of the ranks talk to each other in a process group of their own: the collectives of
    the steps go on meanwhile.
    """

    def __init__(self, device: str) -> None:
        """``device``: `cpu` or `cuda`, where the state is."""
        on_gpu = device == "cuda"
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_LIMIT))
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,  # the next step changes the weights in place
                use_non_blocking_copy=on_gpu,
            )
        )
        self._thread: threading.Thread | None = None
        self._writing: Path | None = None
        self._error: BaseException | None = None

    def begin(
        self,
        checkpoint: Path,
        state: State,
        progress: Progress,
        files: Mapping[str, bytes],
        done: Callable[[], None],
    ) -> None:
        """Copy ``state`` and return; the trainer's part of ``checkpoint`` is then written from the copy.

        ``files`` of this rank, by name, become part of it. ``done`` is called in the writing thread when
        everything is on disk. A checkpoint that is still being written is waited for first. An error in the
        thread is raised there, where it ends the process (see __main__), and again by `settle`.
        """
        self.settle()
        copy = self._stager.stage(state)

        def work() -> None:
            try:
                self._write_together(checkpoint, copy, progress, files)
                done()
            except BaseException as error:
                self._error = error
                raise

        self._writing = checkpoint
        self._thread = threading.Thread(target=work, name=f"checkpoint {checkpoint.name}", daemon=True)
        self._thread.start()

    def settle(self, limit: float = WRITE_LIMIT) -> None:
        """Wait until what was begun is on disk. Raises what went wrong, CheckpointError after ``limit``."""
        if self._thread is None:
            return
        self._thread.join(limit)
        if self._thread.is_alive():
            raise CheckpointError(
                f"trainer rank {dist.get_rank()} did not finish writing {self._writing} within {limit:.0f} s"
            )
        self._thread = None
        if self._error is not None:
            raise self._error

    def _write_together(
        self, checkpoint: Path, state: State, progress: Progress, files: Mapping[str, bytes]
    ) -> None:
        rank = dist.get_rank()
        try:
            self._write(checkpoint, state, progress, files)
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"cannot write {checkpoint}: {_first_failure(error)}") from error
        except OSError as error:
            raise CheckpointError(f"trainer rank {rank} cannot write {checkpoint}: {error}") from error
        except RuntimeError as error:
            if not broke_off(error):
                raise
            raise RanksError(
                f"trainer rank {rank} lost another rank while they wrote {checkpoint}: {error}"
            ) from error

    def _write(self, checkpoint: Path, state: State, progress: Progress, files: Mapping[str, bytes]) -> None:
        part, partial = checkpoint / PART, checkpoint / PARTIAL
        first = dist.get_rank() == 0
        if first:
            for unfinished in (part, partial):  # of a life before this one
                shutil.rmtree(unfinished, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self._group)
        dcp.save(state, checkpoint_id=partial, process_group=self._group)
        for name, content in files.items():
            write_durably(partial / name, content)
        dist.barrier(self._group)
        if first:
            write_durably(partial / PROGRESS, json.dumps(asdict(progress)).encode())
            partial.rename(part)
            sync_folder(checkpoint)
        dist.barrier(self._group)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights, optimizer state and this rank's random states, without a copy."""
    weights, moments = get_state_dict(model, optimizer)
    moments = {"state": moments["state"]}  # how parameters are grouped depends on how ranks divide the work
    return {"model": weights, "optimizer": moments, "random": {str(dist.get_rank()): _random_states()}}


def stored_progress(checkpoint: Path) -> Progress:
    """How far training had come when ``checkpoint`` was made."""
    return Progress(**json.loads((checkpoint / PART / PROGRESS).read_bytes()))


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, moments and random states. All ranks, however many, call it together.

    The optimizer's settings (betas, epsilon, weight decay) stay those that it was made with. A rank beyond
    those that wrote the checkpoint keeps the random states that it has. Raises ChangedError where the files
    hold the state of another model or another type of optimizer, and CheckpointError where they cannot be
    read.
    """
    part = checkpoint / PART
    metadata, state = metadata_of(part), state_of(model, optimizer)
    compare_weights(part, metadata, {name: tensor.shape for name, tensor in state["model"].items()})
    compare_moments(part, metadata, state["optimizer"]["state"])
    rank = str(dist.get_rank())
    stored = metadata.state_dict_metadata
    random = {d: seed for d, seed in state.pop("random")[rank].items() if f"random.{rank}.{d}" in stored}
    if random:
        state["random"] = {rank: random}
    try:
        dcp.load(state, checkpoint_id=part)  # into the very tensors of model and optimizer
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"cannot load {part}: {_first_failure(error)}") from error
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    moments = {**state["optimizer"], "param_groups": groups}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=moments)
    for device, values in random.items():
        _SET_RANDOM[device](values)


def _first_failure(error: dcp.api.CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"trainer rank {rank}: {cause}"


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


_SET_RANDOM = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
