"""What the trainer's loop asks of what it trains. Without torch: a learner need not have a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from stackrl.runtime.transport.messages import Batch, Version


@dataclass(frozen=True)
class Progress:
    """How far training has come."""

    index: int = 0
    """The next optimizer step of the run."""
    step: int = 0
    """RL optimizer steps behind the weights."""
    stage: str = ""
    """The stage that the optimizer state belongs to; empty before the first."""


@dataclass(frozen=True)
class Step:
    """What came of a batch."""

    metrics: dict[str, float]
    """Equal on all ranks."""
    logprobs: np.ndarray | None = None
    """float32 [N]: of this rank's trained tokens in the batch's order, before the step, at the sampling
    temperature. For a batch with ``report`` alone."""


class Learner(Protocol):
    """One rank of what is trained. All ranks call the same methods together."""

    progress: Progress
    source: str
    """Where engines find what rank 0 publishes: a URL or a folder; empty on the other ranks."""

    def apply(self, batch: Batch) -> Step:
        """Take one optimizer step, and be one step further."""

    def publish(self, version: Version) -> dict[str, float]:
        """Give the engines the current weights as ``version``. Returns metrics of it, on rank 0."""

    def save(self, checkpoint: Path, files: Mapping[str, bytes], done: Callable[[], None]) -> None:
        """Write the trainer's part of ``checkpoint`` as of now, this rank's ``files`` by name among it.

        Returns when training may go on, which can be long before the part is on disk. Then ``done`` is
        called, from any thread; what it raises ends the process. A second save waits for the first.
        """

    def settle(self) -> None:
        """Wait until what is being saved is on disk. Raises what kept it from getting there."""
