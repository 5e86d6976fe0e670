"""Hugging Face folders: weights into a model, sharded or not, and a folder written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stackrl.runtime.run import write_durably
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.names import Piece, is_adapter, pieces
from stackrl.runtime.trainer.models.shape import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 << 30
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""Ends of files that hold weights; some published folders have them in several formats."""


@torch.no_grad()
def load(model: Decoder, folder: Path) -> None:
    """Fill the parameters and buffers of ``model`` from ``folder``; of a sharded one, only its part is read.

    Raises ModelError naming the tensors that are missing, unexpected or of another shape.
    """
    wanted = [
        (tensor, piece)
        for name, tensor in model.state_dict().items()
        if not is_adapter(name)
        for piece in pieces(name, tensor.shape, model.names)
    ]
    with _open(folder) as (files, places):
        _compare(
            folder,
            {name: list(files[file].get_slice(name).get_shape()) for name, file in places.items()},
            {piece.name: piece.shape for _, piece in wanted},
            model.names.ignored,
        )
        for tensor, piece in wanted:
            fill(tensor, piece, lambda piece: files[places[piece.name]].get_slice(piece.name))


def save(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write CPU ``tensors`` to ``folder``, in files of at most about SHARD_BYTES with an index where it takes
    several. One file's tensors are in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    total = 0
    for part in _parts(tensors):
        path = folder / _part_name(len(shards))
        save_file(part, path, metadata={"format": "pt"})
        _sync(path)
        shards.append(list(part))
        total += sum(tensor.nbytes for tensor in part.values())
    if len(shards) == 1:
        os.replace(folder / _part_name(0), folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / _part_name(number), folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_durably(folder / INDEX, json.dumps(index, indent=1).encode())


def export(tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, dtype: str) -> None:
    """Write ``tensors`` to ``target`` with the config, tokenizer and templates of ``source``, all at once."""
    with replacing(target) as folder:
        for file in source.iterdir():
            if file.is_file() and file.suffix not in WEIGHTS and file.name != INDEX:
                shutil.copyfile(file, folder / file.name)
        config = json.loads((source / "config.json").read_bytes())
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
        save(tensors, folder)


def fill(tensor: Tensor, piece: Piece, read: Callable[[Piece], Any]) -> None:
    """Copy ``piece`` into ``tensor``, or as much of it as lies in this rank's part.

    ``read`` gives something that can be cut as the whole piece can; it is not called where nothing is copied.
    """
    local, offset = held(tensor)
    # in the dimensions of the whole tensor: from where to where both the piece and this rank's part reach
    begin = [max(b, o) for b, o in zip(piece.begin, offset, strict=True)]
    end = [
        min(b + size, o + length)
        for b, size, o, length in zip(piece.begin, piece.size, offset, local.shape, strict=True)
    ]
    if any(e <= b for b, e in zip(begin, end, strict=True)):
        return
    source = tuple(slice(b - p, e - p) for b, e, p in zip(begin, end, piece.begin, strict=True))
    target = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset, strict=True))
    part = read(piece)[source[piece.stacked :]]
    local[target].copy_(part[None] if piece.stacked else part)


def held(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of ``tensor``, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder, which takes the place of ``target`` when the block ends well and else vanishes."""
    new, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.iterdir():
            _sync(file)
        _sync(new)
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _open(folder: Path):
    """The folder's open safetensors files, and which of them holds each tensor."""
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        paths = [folder / name for name in sorted(set(listed))]
    if not paths:
        raise ModelError(f"{folder} has no safetensors file")
    with ExitStack() as stack:
        try:
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
        yield files, {name: path for path, file in files.items() for name in file.keys()}  # noqa: SIM118


def _compare(
    folder: Path, found: dict[str, list[int]], expected: dict[str, list[int]], ignored: tuple[str, ...]
) -> None:
    unexpected = {
        name
        for name in found.keys() - expected.keys()
        if not _redundant(name) and not name.startswith(ignored)
    }
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} is unexpected" for name in sorted(unexpected)]
    faults += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ModelError(f"the weights in {folder} do not fit its config.json: {'; '.join(faults[:5])}{more}")


def _redundant(name: str) -> bool:
    """Tensors that some folders repeat: a tied head, and frequencies that follow from the config."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > SHARD_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    yield part


def _part_name(number: int) -> str:
    return f".part-{number}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
