"""How new weights travel from the trainer to the engines, and how a receiver knows that they arrived whole.

The trainer publishes every version under Hugging Face names with a manifest (name, dtype, shape and bytes of
each tensor, and the hashes of its chunks). A receiver reads tensor by tensor in the manifest's order, checks
each chunk before it is used, and has the version only when it has every tensor. Transports that receivers
read from are a publisher and a source (source.py):

    pull     trainer rank 0 keeps versions in memory and serves them over HTTP     (pull.py, pull_source.py)
    folder   the trainer writes versions to a folder that engines can read     (folder.py, folder_source.py)

Both keep the newest version and the one before it, so that a receiver in the middle of a version may end
while the next one is published. Both can tell what changed since an older version (delta.py) to a receiver
that holds that version (held.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import torch

from stackrl.runtime.run import RunFolder
from stackrl.runtime.transport.hashes import CHUNK, chunk_hashes
from stackrl.runtime.transport.messages import TensorInfo, Version, WeightManifest
from stackrl.schemas.inference import CollectiveWeights, FolderWeights, PullWeights
from stackrl.schemas.stack import Stack

if TYPE_CHECKING:
    from stackrl.runtime.transport.held_folder import HeldFolder

NamedTensors = Iterable[tuple[str, torch.Tensor]]

KEPT_VERSIONS = 2
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class WeightError(RuntimeError):
    """A version that cannot be published, fetched or trusted."""


class WeightsGone(WeightError):
    """The version asked for is not there any more: a newer one has replaced it."""


@dataclass(frozen=True)
class Published:
    """Bytes of a version, and those that a receiver of the version before it has to fetch."""

    whole: int
    sent: int


class Publisher(Protocol):
    """The trainer's end of a transport; lives on rank 0."""

    source: str
    """What receivers are told: the URL or the folder to read from."""

    def publish(self, version: Version, tensors: NamedTensors) -> Published:
        """Make ``version`` available. ``tensors`` is consumed one at a time; each is copied before the next.

        Raises WeightError where ``version`` does not follow the newest one or a name comes twice.
        """

    def close(self) -> None: ...


def make_publisher(run: RunFolder, stack: Stack, token: str) -> Publisher:
    """The publisher that the stack's ``weights.transport`` names."""
    from stackrl.runtime.transport.collective import make_collective
    from stackrl.runtime.transport.folder import FolderPublisher
    from stackrl.runtime.transport.pull import PullPublisher

    match stack.weights:
        case CollectiveWeights():
            return make_collective(run, stack, token)
        case PullWeights():
            address = urlsplit(run.endpoints().weights)
            delta = stack.weights.content == "delta"
            return PullPublisher(address.hostname or "", address.port or 0, token, delta=delta)
        case FolderWeights(timeout=patience, content=content):
            return FolderPublisher(run.weights(stack), delta=content == "delta", patience=patience)


def receive(
    source: str, version: Version, token: str, timeout: float, held: HeldFolder | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of ``version``, checked, in the manifest's order; at most one in memory at a time.

    ``held``: where this node may keep the version, if its publisher says that changes will follow.
    Raises WeightsGone where a newer version has replaced it, WeightError where it is not there, does not
    come whole or within ``timeout`` seconds.
    """
    from stackrl.runtime.transport.collective_receiver import SCHEME, receive_broadcast
    from stackrl.runtime.transport.held import receive_held
    from stackrl.runtime.transport.source import open_source, receive_whole

    if source.startswith(SCHEME):
        yield from receive_broadcast(source, version, token, timeout)
        return
    deadline = time.monotonic() + timeout
    with open_source(source, token, deadline) as opened:
        manifest = opened.manifest(version)
        check_manifest(manifest, version, opened.name)
        if manifest.changes_follow:
            yield from receive_held(opened, manifest, held, deadline)
        else:
            yield from receive_whole(opened, manifest)


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """The manifest's line for a contiguous CPU tensor."""
    data = as_bytes(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightError(f"{name} has dtype {dtype}, which does not travel; one of {', '.join(DTYPES)} does")
    return TensorInfo(name, dtype, list(tensor.shape), data.nbytes, chunk_hashes(data))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def allocate(info: TensorInfo) -> torch.Tensor:
    """Uninitialised memory for a tensor of a manifest that ``check_manifest`` passed."""
    return torch.empty(info.shape, dtype=DTYPES[info.dtype])


def verify(info: TensorInfo, tensor: torch.Tensor, version: Version, source: str) -> None:
    """Raise WeightError unless ``tensor`` is the one that ``info`` describes."""
    if describe(info.name, tensor) != info:
        raise WeightError(
            f"{info.name} of weight version {version} from {source} is not what its manifest says "
            f"({info.dtype} {info.shape})"
        )


def check_manifest(manifest: WeightManifest, version: Version, source: str) -> None:
    """Raise WeightError where a manifest contradicts itself or is not the one of ``version``."""
    if manifest.version != version:
        raise WeightError(f"{source} gave the manifest of {manifest.version}, asked for {version}")
    seen: set[str] = set()
    for info in manifest.tensors:
        if info.dtype not in DTYPES or any(size < 0 for size in info.shape):
            raise WeightError(f"{source}: {info.name} is a {info.dtype} {info.shape}, which does not travel")
        if info.bytes != math.prod(info.shape) * DTYPES[info.dtype].itemsize:
            raise WeightError(f"{source}: {info.name} {info.dtype} {info.shape} is not {info.bytes} bytes")
        if len(info.chunks) != math.ceil(info.bytes / CHUNK):
            raise WeightError(f"{source}: {info.name} of {info.bytes} bytes has {len(info.chunks)} chunks")
        if info.name in seen:
            raise WeightError(f"{source}: {info.name} is listed twice")
        seen.add(info.name)


def size_of(manifest: WeightManifest) -> int:
    """Bytes of all tensors."""
    return sum(info.bytes for info in manifest.tensors)


def same_layout(some: Sequence[TensorInfo], others: Sequence[TensorInfo]) -> bool:
    """Whether the same tensors lie one after another in both, whatever their values."""
    return [_place(info) for info in some] == [_place(info) for info in others]


def _place(info: TensorInfo) -> tuple[str, str, list[int]]:
    return info.name, info.dtype, info.shape


def snapshots(tensors: NamedTensors) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """A described copy on the CPU of each tensor. Raises WeightError where a name comes twice."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise WeightError(f"the trainer published {name} twice")
        seen.add(name)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        yield describe(name, copy), copy
