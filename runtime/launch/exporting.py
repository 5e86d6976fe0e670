"""`stackrl export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.fork import find_checkpoint
from stackrl.runtime.run import RunError, RunFolder
from stackrl.schemas.lora import Lora


def export(origin: str, target: str | None, dtype: str | None, force: bool) -> int:
    """Write the checkpoint that RUN@STEP names to ``target``, by default ``exports/`` in the run's folder,
    and print where it is. ``dtype``: by default that of the run's stack."""
    run, checkpoint = find_checkpoint(origin, "stackrl export")
    place = Path(target).expanduser() if target else run.path / "exports" / checkpoint.name
    _refuse_to_replace(run, place.resolve(), place, force)
    if not (run.model / "config.json").is_file():
        raise RunError(
            f"run {run.id} has lost its model folder ({run.model}), from which an export takes config and "
            "tokenizer; `stackrl launch --resume` makes it anew"
        )
    stack = run.stack()
    dtype = dtype or stack.model.dtype
    print(f"writing {checkpoint} of run {run.id} in {dtype}", file=sys.stderr)
    _write(checkpoint, run.model, place.resolve(), dtype, stack.trainer.lora)
    print(place)
    return 0


def _write(checkpoint: Path, source: Path, target: Path, dtype: str, adapters: Lora | None) -> None:
    from stackrl.runtime.trainer import exporting
    from stackrl.runtime.trainer.models.shape import ModelError

    try:
        exporting.export(checkpoint, source, target, dtype, adapters)
    except (checkpoints.CheckpointError, ModelError) as error:
        raise RunError(str(error)) from error
    except FileNotFoundError as error:
        raise RunError(
            f"a file went away meanwhile ({error.filename}); a run that goes on deletes its older "
            "checkpoints (checkpoint.keep): try again with a newer one"
        ) from error


def _refuse_to_replace(run: RunFolder, target: Path, written: Path, force: bool) -> None:
    """Raises RunError where something is at ``target`` that is not to be replaced."""
    if target in (run.path, run.model):
        raise RunError(f"{written} belongs to the run itself; name another folder")
    if not target.exists():
        return
    if not target.is_dir():
        raise RunError(f"{written} is a file; name a folder that is not there yet")
    if not (target / "config.json").is_file() and any(target.iterdir()):
        raise RunError(f"{written} holds something else than a model; name a folder that is not there yet")
    if not force and any(target.iterdir()):
        raise RunError(f"{written} is there already; add --force to replace it, or name another folder")
