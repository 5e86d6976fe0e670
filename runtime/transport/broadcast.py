"""A version's tensors on their way through a process group: both ends of it.

All sides lay the manifest's tensors out in the same buckets (buckets.py). While one bucket is packed at rank
0, or loaded at the receivers, the one before or after it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from stackrl.runtime.transport.buckets import Bucket, buckets, checksum
from stackrl.runtime.transport.messages import TensorInfo
from stackrl.runtime.transport.process_group import Group, GroupError


def send(group: Group, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor], size: int) -> None:
    """Rank 0's part: send ``tensors`` in buckets of ``size`` bytes. Raises GroupError."""
    rest = iter(tensors)
    arrived: Callable[[], None] = _at_once
    for bucket in buckets(infos, size):
        content = bucket.pack([next(rest) for _ in bucket.tensors], group.device)
        arrived()
        arrived = _sent(group, content, size)
    arrived()


def arriving(
    group: Group, infos: Sequence[TensorInfo], size: int
) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """A receiver's part: each tensor of ``infos``, on the group's device, in memory that nobody writes again.

    At most two buckets are in memory besides what the caller keeps. Raises GroupError.
    """
    under_way: tuple[Bucket, Callable[[], torch.Tensor]] | None = None
    for bucket in (*buckets(infos, size), None):
        next_one = bucket and (bucket, _received(group, bucket.bytes, size))
        if under_way:
            now, content = under_way
            yield from zip(now.tensors, now.unpack(content()), strict=True)
        under_way = next_one


def _sent(group: Group, content: torch.Tensor, size: int) -> Callable[[], None]:
    finish = group.broadcast(content, size)
    if group.device.type == "cpu":
        return finish
    finish_sum = group.broadcast(checksum(content).view(torch.uint8), size)

    def both() -> None:
        finish()
        finish_sum()

    return both


def _received(group: Group, count: int, size: int) -> Callable[[], torch.Tensor]:
    """Begin to receive ``count`` bytes; the returned function waits for them.

    On a CPU the caller compares their hashes with the manifest. A GPU's content has its checksum behind it.
    """
    content = torch.empty(count, dtype=torch.uint8, device=group.device)
    finish = group.broadcast(content, size)
    told = torch.empty(2, dtype=torch.int64, device=group.device)
    finish_sum = _at_once if group.device.type == "cpu" else group.broadcast(told.view(torch.uint8), size)

    def arrived() -> torch.Tensor:
        finish()
        finish_sum()
        if group.device.type != "cpu" and not torch.equal(told, checksum(content)):
            raise GroupError("a bucket did not arrive as it was sent")
        return content

    return arrived


def _at_once() -> None:
    """There is nothing to wait for."""
