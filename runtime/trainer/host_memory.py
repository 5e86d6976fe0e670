"""Memory of a device that waits in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class Stowed:
    """The memory behind a tensor, copied to the host; parts of it are brought back when they are asked for.

    On a GPU the copy is made beside the computation, through pinned memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        """The tensor's memory must stay as it is until `let_go`."""
        self._device = tensor.device
        self._source: Tensor | None = _bytes(tensor)
        self._host = torch.empty_like(self._source, device="cpu", pin_memory=tensor.is_cuda)
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            stream = _beside(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._host.copy_(self._source, non_blocking=True)
            self._source.record_stream(stream)
            self._done = stream.record_event()
        else:
            self._host.copy_(self._source)
        self._back: Tensor | None = None
        self._parts = self._asked = 0

    def part(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Gives ``tensor``, which lies in this memory, again."""
        self._parts += 1
        where = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return lambda: self._again(*where)

    def let_go(self) -> None:
        """The memory on the device may be used for other things."""
        self._source = None

    def _again(self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if self._back is None:
            if self._done is not None:
                torch.cuda.current_stream(self._device).wait_event(self._done)
            self._back = self._host.to(self._device, non_blocking=True, copy=True)
        part = self._back.view(dtype).as_strided(shape, stride, offset)
        self._asked += 1
        if self._asked % self._parts == 0:  # each has been asked for: nobody else waits for the device's copy
            self._back = None
        return part


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that ``tensor`` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
